"""What the source of a class says of its dropout: the attributes that a forward reads, and the rates of its calls."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from hookdrop.recipes.methods import Method, Path, methods_that_run, path_of

_FUNCTIONS = re.compile(r"(\w*_)?dropout(\d?d|_)?|drop_path|stochastic_depth|drop_block_?\dd|\w*attention\w*")
_CLASSES = re.compile(r"(Feature)?(Alpha)?Dropout(\dd)?")
_POSITIONS = {"scaled_dot_product_attention": 4, "multi_head_attention_forward": 10}
"""Of the rate among the arguments; a functional dropout has it second, other functions of attention by name."""
_ARGUMENTS = ("p", "dropout_p", "dropout", "rate", "prob", "drop_prob")
_TRANSPARENT = ("float", "min", "max")


@dataclass(frozen=True)
class DropCall:
    """A call of functional dropout, or of attention with dropout."""

    code: str
    rates: tuple[Path, ...]
    """From where below `self` its rate may come: `("cfg", "dropout")` for `self.cfg.dropout`."""
    elsewhere: bool
    """Whether it may also come from somewhere else: a number in the code, a global name, arithmetic."""


@dataclass(frozen=True)
class Reading:
    """What the forward of a class does with dropout."""

    attributes: tuple[str, ...] = ()
    """That it reads from itself."""
    from_config: tuple[str, ...] = ()
    """Rates that it reads from the model's configuration at each call."""
    calls: tuple[DropCall, ...] = ()
    unread: tuple[str, ...] = ()
    """The methods without a source to read this from."""


@lru_cache(maxsize=1024)
def read(cls: Any) -> Reading:
    """What the source of `forward`, and of the methods that it calls, says."""
    attributes: dict[str, None] = {}
    from_config: dict[str, None] = {}
    calls: dict[DropCall, None] = {}
    methods, unread = methods_that_run(cls)
    for method in methods:
        for node in method.nodes:
            path = path_of(node) or ()
            if path[:1] == (method.me,) and len(path) == 2:
                if isinstance(getattr(node, "ctx", ast.Load()), ast.Load) and not method.is_property:
                    attributes[path[1]] = None
            elif path[:2] == (method.me, "config") and len(path) == 3 and "drop" in path[2]:
                from_config[path[2]] = None
            elif isinstance(node, ast.Call) and (rate := _rate_of(node, method)) is not None:
                found = set(_sources(rate, method, ()))
                paths = tuple(sorted(path for path in found if path is not None))
                if found:
                    calls[DropCall(ast.unparse(node), paths, None in found)] = None
    return Reading(tuple(attributes), tuple(from_config), tuple(calls), tuple(unread))


def _rate_of(call: ast.Call, method: Method) -> ast.expr | None:
    """The argument that is the rate, if this is a call of functional dropout, or of attention with dropout."""
    path = path_of(call.func)
    if path is None or path[0] == method.me:
        return None
    name = path[-1] if _is_drop(path[-1]) else getattr(_outside(path, method), "__name__", "")
    if not _is_drop(name):
        return None
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    position = 0 if _CLASSES.fullmatch(name) else _POSITIONS.get(name, None if "attention" in name else 1)
    if (named := next((given[word] for word in _ARGUMENTS if word in given), None)) is not None:
        return named
    starred = any(isinstance(argument, ast.Starred) for argument in call.args)
    if position is not None and (len(call.args) > position or starred):
        return call if starred else call.args[position]
    if "dropout" in name.lower():
        return call if None in given else ast.Constant(0.5)  # torch's default
    return None


def _is_drop(name: str) -> bool:
    return bool(_CLASSES.fullmatch(name) or _FUNCTIONS.fullmatch(name))


def _sources(node: ast.expr | None, method: Method, seen: tuple[object, ...]) -> Iterator[Path | None]:
    """The paths below `self` that a rate may come from; None for whatever else is no 0."""
    if isinstance(node, ast.Constant):
        yield from [None] if node.value else []
    elif node is not None and (path := path_of(node)) is not None:
        yield from _sources_of_path(path, method, seen)
    elif isinstance(node, ast.IfExp):
        yield from _all_sources([node.body, node.orelse], method, seen)
    elif isinstance(node, ast.BoolOp):
        yield from _all_sources(node.values, method, seen)
    elif isinstance(node, ast.NamedExpr):
        yield from _sources(node.value, method, seen)
    elif isinstance(node, ast.Call) and path_of(node.func) in [(name,) for name in _TRANSPARENT]:
        yield from _all_sources(node.args, method, seen)
    elif isinstance(node, ast.BinOp):
        yield from _of_arithmetic(node, method, seen)
    else:
        yield None


def _all_sources(nodes: list[ast.expr], method: Method, seen: tuple[object, ...]) -> Iterator[Path | None]:
    for node in nodes:
        yield from _sources(node, method, seen)


def _of_arithmetic(node: ast.BinOp, method: Method, seen: tuple[object, ...]) -> Iterator[Path | None]:
    """`self.p * self.training` is p itself; what is computed of it is not."""
    sides = [list(_sources(side, method, seen)) for side in (node.left, node.right)]
    if isinstance(node.op, ast.Mult) and [] in sides:
        yield from sides[0] + sides[1]
    elif sides != [[], []]:
        yield None


def _sources_of_path(path: Path, method: Method, seen: tuple[object, ...]) -> Iterator[Path | None]:
    head, rest = path[0], path[1:]
    if head == method.me and rest:
        yield from [] if rest == ("training",) else [rest]
    elif (method, head) in seen or rest[-1:] == ("training",):
        return
    elif head in method.local or head in method.parameters:
        inner = (*seen, (method, head))
        for value in method.local.get(head, []):
            yield from _below(value, rest, method, inner)
        if head in method.parameters:
            yield from _given(head, rest, method, inner)
    elif _global(path, method):
        yield None


def _below(node: ast.expr | None, rest: Path, method: Method, seen: tuple[object, ...]) -> Iterator[Path | None]:
    """The sources of `NODE.rest`."""
    if not rest or node is None:
        yield from _sources(node, method, seen)
    elif (path := path_of(node)) is not None:
        yield from _sources_of_path((*path, *rest), method, seen)
    else:
        yield None


def _given(name: str, rest: Path, method: Method, seen: tuple[object, ...]) -> Iterator[Path | None]:
    """The sources of a parameter: what the other methods give it, or else its default."""
    for call, caller in method.calls:
        if call is None:
            yield None
            continue
        by_name = {keyword.arg: keyword.value for keyword in call.keywords}
        by_place = dict(zip(method.given, call.args, strict=False))
        value = by_name.get(name, by_place.get(name, by_name.get(None)))
        if value is not None:
            yield from _below(value, rest, caller, seen)
        elif name in method.defaults:
            yield from _below(method.defaults[name], rest, method, seen)
    if not method.calls and name in method.defaults:
        yield from _below(method.defaults[name], rest, method, seen)


def _global(path: Path, method: Method) -> bool:
    """Whether a name from outside of the method may stand for a rate that is not 0."""
    value = _outside(path, method)
    return not isinstance(value, int | float) or bool(value)


def _outside(path: Path, method: Method) -> Any:
    """What a name stands for outside of the method; None if that is not known."""
    code, cells = method.function.__code__, method.function.__closure__ or ()
    around = dict(zip(code.co_freevars, cells, strict=True))
    try:
        value: Any = around[path[0]].cell_contents if path[0] in around else method.function.__globals__.get(path[0])
    except ValueError:  # A name that has no value yet.
        return None
    for name in path[1:]:
        value = getattr(value, name, None)
    return value

"""The dropout that a model has by itself: where its rates are kept, and read at each forward.

A rate can be changed where a forward reads it from an attribute at each call. Whether it does is read from the source
of its class: of `forward`, and of the methods that it calls.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import nn

from hookdrop.layers import walk
from hookdrop.regularizers import Regularizer

_OTHER_NAMES = ("p", "prob", "rate")
"""What modules whose class says that they drop call their rate, if not by a name with "drop" in it."""
_FUNCTIONS = re.compile(r"(\w*_)?dropout(\d?d|_)?|\w*attention\w*")
_RATE_ARGUMENTS = ("p", "dropout_p", "dropout", "rate")


@dataclass(frozen=True)
class Rate:
    """An attribute that a forward reads its drop probability from."""

    name: str
    """Of a module that does nothing but drop: its name; else that and the attribute."""
    module: nn.Module
    attribute: str

    @property
    def value(self) -> float:
        """What it is now."""
        return float(getattr(self.module, self.attribute))


@dataclass(frozen=True)
class _Reading:
    """What the forward of a class does with dropout."""

    attributes: tuple[str, ...] = ()
    """That it reads from itself."""
    fixed: tuple[str, ...] = ()
    """Its calls of functional dropout, as they are written, at a rate that is no attribute."""
    from_config: tuple[str, ...] = ()
    """Rates that it reads from the model's configuration at each call."""
    unread: bool = False
    """Whether there is no source to read this from."""


def rates(model: nn.Module) -> list[Rate]:
    """Every rate of the model that can be changed, in `named_modules()` order."""
    return [
        Rate(_rate_name(layer.name, layer.module, attribute), layer.module, attribute)
        for layer in walk(model)
        for attribute in _attributes(layer.module)
    ]


def out_of_reach(model: nn.Module) -> dict[str, list[str]]:
    """What can't be changed: a line about the code, and the names of the modules that run it."""
    found: dict[str, list[str]] = {}
    for layer in walk(model):
        reading, forward = _reading_of(layer.module), f"{type(layer.module).__name__}.forward"
        if reading.unread:
            found.setdefault(f"the source of {forward} can't be read", []).append(layer.name)
        for call in reading.fixed:
            found.setdefault(f"{forward} calls {call}", []).append(layer.name)
        for name in reading.from_config:
            if isinstance(getattr(getattr(layer.module, "config", None), name, None), int | float):
                found.setdefault(f"{forward} reads config.{name}", []).append(layer.name)
    return found


def _attributes(module: nn.Module) -> list[str]:
    if isinstance(module, Regularizer):
        return [module.rate_name] if module.drops and module.rate_name is not None else []
    return [attribute for attribute in _reading_of(module).attributes if _is_rate(module, attribute)]


def _is_rate(module: nn.Module, attribute: str) -> bool:
    value = getattr(module, attribute, None)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
        return False
    return "drop" in attribute or (attribute in _OTHER_NAMES and drops_only(module))


def drops_only(module: nn.Module) -> bool:
    """Whether dropping is all that a module does: it has no other module and no weight."""
    says_so = re.search("drop|stochastic", type(module).__name__, re.IGNORECASE) is not None
    return says_so and not any(module.children()) and not any(True for _ in module.parameters(recurse=False))


def _rate_name(name: str, module: nn.Module, attribute: str) -> str:
    if drops_only(module):
        return name
    return f"{name}.{attribute}" if name else attribute


def _reading_of(module: nn.Module) -> _Reading:
    cls: Any = type(module)
    return _reading(cls)


@lru_cache(maxsize=1024)
def _reading(cls: type) -> _Reading:
    attributes: dict[str, None] = {}
    fixed: dict[str, None] = {}
    from_config: dict[str, None] = {}
    methods = list(_methods_that_run(cls))
    for method in methods:
        for node in ast.walk(method):
            if (path := _path(node)) is None:
                if isinstance(node, ast.Call) and _is_fixed(node):
                    fixed[ast.unparse(node)] = None
            elif path[0] == "self" and len(path) == 2:
                attributes[path[1]] = None
            elif path[:2] == ("self", "config") and len(path) == 3 and "drop" in path[2]:
                from_config[path[2]] = None
    return _Reading(tuple(attributes), tuple(fixed), tuple(from_config), unread=not methods)


def _methods_that_run(cls: type) -> Iterator[ast.FunctionDef]:
    """`forward` and the methods of the class that it calls, and that these call."""
    waiting, seen = ["forward"], {"forward"}
    while waiting:
        method = _parsed(getattr(cls, waiting.pop(), None))
        if method is None:
            continue
        yield method
        for node in ast.walk(method):
            path = _path(node)
            if path is not None and path[0] == "self" and len(path) == 2 and path[1] not in seen:
                if inspect.isfunction(inspect.getattr_static(cls, path[1], None)):
                    waiting.append(path[1])
                seen.add(path[1])


def _parsed(function: object) -> ast.FunctionDef | None:
    """The source of a method; None if there is none to read."""
    if not callable(function):
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError, SyntaxError):
        return None
    return next((node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)), None)


def _path(node: ast.AST) -> tuple[str, ...] | None:
    """`("self", "config", "dropout")` of `self.config.dropout`."""
    if isinstance(node, ast.Name):
        return (node.id,)
    before = _path(node.value) if isinstance(node, ast.Attribute) else None
    return None if before is None else (*before, node.attr)  # type: ignore[attr-defined]


def _is_fixed(call: ast.Call) -> bool:
    """Whether it is a call of functional dropout at a rate that is written in the code."""
    path = _path(call.func)
    if path is None or path[0] == "self" or not _FUNCTIONS.fullmatch(path[-1]):
        return False
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    rate = next((given[name] for name in _RATE_ARGUMENTS if name in given), None)
    if rate is None and "dropout" in path[-1]:
        rate = call.args[1] if len(call.args) > 1 else ast.Constant(0.5)  # torch's default
    nodes = [] if rate is None else list(ast.walk(rate))
    written = any(isinstance(node, ast.Constant) and isinstance(node.value, float) and node.value for node in nodes)
    return written and not any(isinstance(node, ast.Attribute) and node.attr != "training" for node in nodes)

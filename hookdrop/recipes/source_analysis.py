"""Analyze the source of a module class: the attributes that `forward` reads, and its calls of dropout."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from types import FunctionType
from typing import Any, TypeAlias

Path: TypeAlias = tuple[str, ...]
"""`("self", "cfg", "dropout")` stands for `self.cfg.dropout`."""
Sources: TypeAlias = set[Path | None]
"""Paths below `self` that a value may come from; None stands for any other nonzero source."""
Seen: TypeAlias = frozenset[tuple["Method", str]]
"""The names already being traced, so that a name assigned from itself ends the search."""

_FUNCTIONS = re.compile(r"(\w*_)?dropout(\d?d|_)?|drop_path|stochastic_depth|drop_block_?\dd|\w*attention\w*")
_CLASSES = re.compile(r"(Feature)?(Alpha)?Dropout(\dd)?")
_POSITIONS = {"scaled_dot_product_attention": 4, "multi_head_attention_forward": 10}
"""Position of the rate. In functional dropout it is the second argument; other attention functions take a keyword."""
_KEYWORDS = ("p", "dropout_p", "dropout", "rate", "prob", "drop_prob")
_PASS_THROUGH_CALLS = (("float",), ("min",), ("max",))


@dataclass(frozen=True)
class DropCall:
    """A call of functional dropout or of attention with dropout."""

    code: str
    rates: tuple[Path, ...]
    """Attributes that its rate may come from: `("cfg", "dropout")` for `self.cfg.dropout`."""
    elsewhere: bool
    """Whether the rate may also come from a literal, a global name or arithmetic."""


@dataclass(frozen=True)
class DropoutSource:
    """The dropout in `forward` of a class and in the methods that it calls."""

    attributes: tuple[str, ...]
    """Attributes read from `self`."""
    from_config: tuple[str, ...]
    """Rates read from `self.config` at each call."""
    calls: tuple[DropCall, ...]
    unreadable: tuple[str, ...]
    """Methods whose source is not available."""

    @property
    def rate_attributes(self) -> set[str]:
        """The attributes passed as the rate of a dropout call."""
        return {path[0] for call in self.calls for path in call.rates if len(path) == 1}


@lru_cache(maxsize=1024)
def analyze(cls: Any) -> DropoutSource:
    """Analyze `forward` and the methods that it calls."""
    attributes: dict[str, None] = {}
    from_config: dict[str, None] = {}
    calls: dict[DropCall, None] = {}
    methods, unreadable = reachable_methods(cls)
    for method in methods:
        for node in method.nodes:
            path = dotted_path(node) or ()
            if path[:1] == (method.self_name,) and len(path) == 2:
                if isinstance(getattr(node, "ctx", ast.Load()), ast.Load) and not method.is_property:
                    attributes[path[1]] = None
            elif path[:2] == (method.self_name, "config") and len(path) == 3 and "drop" in path[2]:
                from_config[path[2]] = None
            elif isinstance(node, ast.Call) and (found := method.sources_of_call(node)):
                paths = sorted(path for path in found if path is not None)
                calls[DropCall(ast.unparse(node), tuple(paths), None in found)] = None
    return DropoutSource(tuple(attributes), tuple(from_config), tuple(calls), tuple(unreadable))


def safe_getattr(owner: object, name: str) -> Any:
    """Return `owner.name`, or None if it does not exist or raises, as a lazy import may."""
    try:
        return getattr(owner, name, None)
    except Exception:
        return None


def dotted_path(node: ast.AST) -> Path | None:
    """Return `("self", "config", "dropout")` for `self.config.dropout` and `getattr(self.config, "dropout")`."""
    if isinstance(node, ast.Name):
        return (node.id,)
    owner: ast.AST | None = None
    if isinstance(node, ast.Attribute):
        owner, name = node.value, node.attr
    elif isinstance(node, ast.Call) and dotted_path(node.func) == ("getattr",) and len(node.args) > 1:
        constant = node.args[1]
        if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
            owner, name = node.args[0], constant.value
    before = None if owner is None else dotted_path(owner)
    return None if before is None else (*before, name)


def _rate_argument(call: ast.Call, name: str) -> ast.expr | None:
    """Return the rate argument of a call of functional dropout or attention; None if it passes no rate."""
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    for keyword in _KEYWORDS:
        if keyword in given:
            return given[keyword]
    position = 0 if _CLASSES.fullmatch(name) else _POSITIONS.get(name, None if "attention" in name else 1)
    if position is not None and any(isinstance(argument, ast.Starred) for argument in call.args):
        return call
    if position is not None and len(call.args) > position:
        return call.args[position]
    if "dropout" in name.lower():
        return call if None in given else ast.Constant(0.5)  # torch's default
    return None


def _is_dropout(name: str) -> bool:
    return bool(_CLASSES.fullmatch(name) or _FUNCTIONS.fullmatch(name))


@dataclass(eq=False)
class Method:
    """A parsed method that runs in a forward."""

    owner: type
    function: FunctionType
    tree: ast.FunctionDef
    callers: list[tuple[ast.Call | None, Method]] = field(default_factory=list)
    """Its calls with the methods that make them; the call is None where a method passes it on without calling it."""

    def __post_init__(self) -> None:
        parameters = inspect.signature(self.function).parameters
        member = inspect.getattr_static(self.owner, self.tree.name, None)
        self.is_property = isinstance(member, property)
        positional = [name for name, p in parameters.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self.self_name = positional[0] if positional and not isinstance(member, staticmethod) else ""
        self.positional = positional[bool(self.self_name) :]
        self.defaults = {name: p.default for name, p in parameters.items() if name != self.self_name}
        """The default of each parameter, `Parameter.empty` if it has none."""
        self.nodes = sorted(
            ast.walk(self.tree), key=lambda node: (getattr(node, "lineno", 0), getattr(node, "col_offset", 0))
        )
        values: dict[int, ast.expr] = {}
        """Assigned values by the id of the target. A loop assigns an element."""
        for node in self.nodes:
            if isinstance(node, ast.Assign):
                values |= {id(target): node.value for target in node.targets}
            elif isinstance(node, ast.AnnAssign | ast.NamedExpr):
                values[id(node.target)] = node.value or node.target
            elif isinstance(node, ast.For | ast.comprehension):
                values[id(node.target)] = ast.Subscript(node.iter, ast.Constant(0), ast.Load())
        self.assigned: dict[str, list[ast.expr | None]] = {}
        """The values assigned to each local name; None for a value that the source does not show."""
        for node in self.nodes:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.assigned.setdefault(node.id, []).append(values.get(id(node)))
            elif isinstance(node, ast.arg) and node.arg not in parameters:  # of a nested function
                self.assigned.setdefault(node.arg, []).append(None)

    def is_self_or_part(self, name: str) -> bool:
        """Whether a name is `self`, or a local name for a part of it such as `self.dropouts[0]`."""
        return name == self.self_name or (name in self.assigned and all(map(self._is_part, self.assigned[name])))

    def _is_part(self, value: ast.expr | None) -> bool:
        while isinstance(value, ast.Subscript | ast.Attribute):
            value = value.value
        return isinstance(value, ast.Name) and value.id == self.self_name

    def sources_of_call(self, call: ast.Call) -> Sources:
        """Return the sources of the rate of a dropout call; empty for other calls and for rate 0."""
        path = dotted_path(call.func)
        if path is None or self.is_self_or_part(path[0]):
            return set()
        name = path[-1] if _is_dropout(path[-1]) else str(safe_getattr(self.outer_value(path), "__name__"))
        rate = _rate_argument(call, name) if _is_dropout(name) else None
        return set() if rate is None else self.sources(rate)

    def sources(self, node: ast.expr | None, rest: Path = (), seen: Seen = frozenset()) -> Sources:
        """Return the sources of the rate `node.rest`."""
        path = None if node is None else dotted_path(node)
        if path is not None:
            return self._sources_of_path((*path, *rest), seen)
        if rest or node is None:
            return {None}
        if isinstance(node, ast.Constant):
            return {None} if node.value else set()
        if isinstance(node, ast.BinOp):
            sides = [self.sources(side, (), seen) for side in (node.left, node.right)]
            if isinstance(node.op, ast.Mult) and not all(sides):  # `self.p * self.training` is p or 0
                return sides[0] | sides[1]
            return {None} if any(sides) else set()
        parts = _choices(node)
        return {None} if parts is None else set().union(*(self.sources(part, (), seen) for part in parts))

    def _sources_of_path(self, path: Path, seen: Seen) -> Sources:
        head, rest = path[0], path[1:]
        if head == self.self_name and rest:
            return set() if rest == ("training",) else {rest}
        if (self, head) in seen or rest[-1:] == ("training",):
            return set()
        if head not in self.assigned and head not in self.defaults:
            return {None} if _may_drop(self.outer_value(path)) else set()
        seen |= {(self, head)}
        found = set().union(*(self.sources(value, rest, seen) for value in self.assigned.get(head, ())))
        return found | self._sources_of_parameter(head, rest, seen) if head in self.defaults else found

    def _sources_of_parameter(self, name: str, rest: Path, seen: Seen) -> Sources:
        """Return the sources of the values that callers pass, or of the default."""
        default = self.defaults[name]
        is_off = default is None or default is inspect.Parameter.empty or not _may_drop(default)
        of_default: Sources = set() if is_off else {None}
        found: Sources = set() if self.callers else of_default
        for call, caller in self.callers:
            if call is None:
                found |= {None}
                continue
            given: dict[str | None, ast.expr] = dict(zip(self.positional, call.args, strict=False))
            given |= {keyword.arg: keyword.value for keyword in call.keywords}
            value = given.get(name, given.get(None))
            found |= of_default if value is None else caller.sources(value, rest, seen)
        return found

    def outer_value(self, path: Path) -> Any:
        """Return the value of a global or enclosing name, or None if it is not defined."""
        cells = dict(zip(self.function.__code__.co_freevars, self.function.__closure__ or (), strict=True))
        try:
            value = cells[path[0]].cell_contents if path[0] in cells else self.function.__globals__.get(path[0])
        except ValueError:  # not assigned yet
            return None
        for name in path[1:]:
            value = safe_getattr(value, name)
        return value


def _choices(node: ast.expr) -> list[ast.expr] | None:
    """Return the expressions that `node` chooses between, or None if it computes something else."""
    if isinstance(node, ast.IfExp):
        return [node.body, node.orelse]
    if isinstance(node, ast.BoolOp):
        return node.values
    if isinstance(node, ast.NamedExpr):
        return [node.value]
    return node.args if isinstance(node, ast.Call) and dotted_path(node.func) in _PASS_THROUGH_CALLS else None


def _may_drop(value: object) -> bool:
    """Whether a value from outside the class may be a rate above 0."""
    # `isinstance` reads `__class__`, which raises for some lazy imports.
    return not issubclass(type(value), int | float) or bool(value)


def reachable_methods(cls: type) -> tuple[list[Method], list[str]]:
    """Return `forward` and all methods that it calls, inherited ones included, and the names without source."""
    found: dict[tuple[type, str], Method | None] = {}
    unreadable = []
    waiting: list[tuple[str, int, ast.Call | None, Method | None]] = [("forward", 0, None, None)]
    for name, start, call, caller in waiting:  # grows while iterating: each method appends those it calls
        owner = next((parent for parent in cls.__mro__[start:] if name in vars(parent)), cls)
        member = vars(owner).get(name)
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if name != "forward" and not inspect.isfunction(function):
            continue
        if (owner, name) not in found:
            found[owner, name] = parsed = _parse(owner, name, function)
            if parsed is not None:
                waiting += _called_methods(cls, parsed)
            elif not isinstance(member, property):
                unreadable.append(name)
        method = found[owner, name]
        if method is not None and caller is not None:
            method.callers.append((call, caller))
    return [method for method in found.values() if method is not None], unreadable


def _called_methods(cls: type, method: Method) -> Iterator[tuple[str, int, ast.Call | None, Method | None]]:
    """Yield (name, start in the MRO, call, caller) for each method that `method` mentions."""
    parents = [parent.__name__ for parent in cls.__mro__]
    calls = {id(node.func): node for node in method.nodes if isinstance(node, ast.Call)}
    for node in method.nodes:
        if not isinstance(node, ast.Attribute):
            continue
        path, call = dotted_path(node), calls.get(id(node))
        given = [] if call is None else call.args
        if isinstance(node.value, ast.Call) and dotted_path(node.value.func) == ("super",):
            yield node.attr, cls.__mro__.index(method.owner) + 1, call, method
        elif path is not None and path[0] == method.self_name and len(path) == 2:
            yield path[1], 0, call, method
        elif path is not None and path[-2] in parents and given and dotted_path(given[0]) == (method.self_name,):
            assert call is not None  # Parent.method(self, ...)
            yield path[-1], parents.index(path[-2]), ast.Call(call.func, given[1:], call.keywords), method


def _parse(owner: type, name: str, function: Any) -> Method | None:
    """Parse a method; None if its source is not available, or only that of a decorator around it."""
    if not callable(function):
        return None
    function = inspect.unwrap(function)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None
    found = next((node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)), None)
    if found is None or not isinstance(function, FunctionType):
        return None
    is_wrapper = found.name != name and set(function.__code__.co_freevars) - {"__class__"}
    return None if is_wrapper else Method(owner, function, found)

"""The methods that run in a forward, as their source."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, TypeAlias

Path: TypeAlias = tuple[str, ...]
"""`("self", "cfg", "dropout")` of `self.cfg.dropout`."""


@dataclass
class Method:
    """A method that runs, parsed."""

    owner: type
    function: FunctionType
    tree: ast.FunctionDef
    nodes: list[ast.AST] = field(default_factory=list)
    calls: list[tuple[ast.Call | None, Method]] = field(default_factory=list)
    """Of it, by the methods that do so; None where one only mentions it."""
    local: dict[str, list[ast.expr | None]] = field(default_factory=dict)
    """What is assigned to a name; None if that takes more than reading."""

    def __post_init__(self) -> None:
        given = [*self.tree.args.posonlyargs, *self.tree.args.args]
        kept = inspect.getattr_static(self.owner, self.tree.name, None)
        self.me = given[0].arg if given and not isinstance(kept, staticmethod) else ""
        self.is_property = isinstance(kept, property)
        self.given = [argument.arg for argument in given if argument.arg != self.me]
        self.nodes = sorted(ast.walk(self.tree), key=_place)
        own = {node.arg for node in ast.walk(self.tree.args) if isinstance(node, ast.arg)}
        self.parameters = own - {self.me}
        for node in self.nodes:
            if isinstance(node, ast.arg) and node.arg not in own:  # of a function inside
                self.local[node.arg] = [None]
        for node in self.nodes:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.local.setdefault(node.id, [])
        for node in self.nodes:
            self._bind(node)
        for name, values in self.local.items():
            if not values:
                self.local[name] = [None]
        late = given[len(given) - len(self.tree.args.defaults) :]
        with_defaults = [*zip(late, self.tree.args.defaults, strict=True)]
        by_keyword = zip(self.tree.args.kwonlyargs, self.tree.args.kw_defaults, strict=True)
        self.defaults = {a.arg: value for a, value in [*with_defaults, *by_keyword] if value is not None}

    def _bind(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                for name in ast.walk(target):
                    if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
                        self.local[name.id].append(node.value if name is target else None)
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and isinstance(node.target, ast.Name):
            self.local[node.target.id] += [] if node.value is None else [node.value]
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            self.local[node.target.id].append(None)


def path_of(node: ast.AST) -> Path | None:
    """`("self", "config", "dropout")` of `self.config.dropout`, or with `getattr(self.config, "dropout")`."""
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute):
        before = path_of(node.value)
        return None if before is None else (*before, node.attr)
    if isinstance(node, ast.Call) and path_of(node.func) == ("getattr",) and len(node.args) > 1:
        before, name = path_of(node.args[0]), node.args[1]
        if before is not None and isinstance(name, ast.Constant) and isinstance(name.value, str):
            return (*before, name.value)
    return None


def methods_that_run(cls: type) -> tuple[list[Method], list[str]]:
    """`forward` and the methods that it calls, its own and its parents', and that these call; what can't be read."""
    found: dict[tuple[type, str], Method | None] = {}
    waiting: list[tuple[str, int, ast.Call | None, Method | None]] = [("forward", 0, None, None)]
    while waiting:
        name, start, call, caller = waiting.pop(0)
        owner = next((parent for parent in cls.__mro__[start:] if name in vars(parent)), None)
        function = None if owner is None else vars(owner)[name]
        if isinstance(function, staticmethod | classmethod | property):
            function = function.fget if isinstance(function, property) else function.__func__
        if owner is None or (name != "forward" and not inspect.isfunction(function)):
            continue
        if (owner, name) not in found:
            found[owner, name] = method = _parsed(owner, name, function)
            if method is not None:
                waiting += _called(cls, method)
        method = found[owner, name]
        if method is not None and caller is not None:
            method.calls.append((call, caller))
    unread = [name for (owner, name), method in found.items() if method is None]
    return [method for method in found.values() if method is not None], [
        name for name in unread if not isinstance(inspect.getattr_static(cls, name, None), property)
    ]


def _called(cls: type, method: Method) -> Iterator[tuple[str, int, ast.Call | None, Method | None]]:
    """(name, where in the MRO to look from, call, caller) of each method that a method mentions."""
    parents = [parent.__name__ for parent in cls.__mro__]
    calls = {id(node.func): node for node in method.nodes if isinstance(node, ast.Call)}
    for node in method.nodes:
        if not isinstance(node, ast.Attribute):
            continue
        path, call = path_of(node), calls.get(id(node))
        if isinstance(node.value, ast.Call) and path_of(node.value.func) == ("super",):
            yield node.attr, cls.__mro__.index(method.owner) + 1, call, method
        elif path is not None and path[0] == method.me and len(path) == 2:
            yield path[1], 0, call, method
        elif path is not None and call is not None and path[-2] in parents and call.args[:1]:
            bare = ast.Call(call.func, call.args[1:], call.keywords)
            if path_of(call.args[0]) == (method.me,):  # Parent.method(self, ...)
                yield path[-1], parents.index(path[-2]), bare, method


def _place(node: ast.AST) -> tuple[int, int]:
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def _parsed(owner: type, name: str, function: Any) -> Method | None:
    """The source of a method; None if there is none to read, or only that of a decorator around it."""
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
    around = set(function.__code__.co_freevars) - {"__class__"}
    return None if found.name != name and around else Method(owner, function, found)

"""The text form of regularizers, recipes and schedules: a call by name with literal settings, never evaluated as code.

`parse` reads what `repr` writes. Classes and functions from elsewhere are written with their full name, and reading
them, by this name or by their own, requires that the caller allows each.
"""

from __future__ import annotations

import ast
import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import nn

from hookdrop.core.arguments import init_parameters, settings_text, signature_line
from hookdrop.core.errors import StateError, nearest
from hookdrop.core.parts import RECIPES, REGULARIZERS
from hookdrop.core.recipe import Recipe
from hookdrop.core.regularizer import Regularizer
from hookdrop.core.schedules import SCHEDULES, Schedule

Allowed: TypeAlias = Sequence[Callable[..., Any]]


def known_names() -> tuple[str, ...]:
    """Return all names that `parse` knows. A recipe is imported when it is first used."""
    return (*REGULARIZERS, *sorted(RECIPES), *SCHEDULES)


def parse(text: str) -> Any:
    """Create a regularizer, a recipe or a schedule from a string, for flags, sweeps and configuration files.

    The string is never evaluated as code. It is what `repr` returns.

    Args:
        text: a call by name with literal settings.

    Raises:
        TypeError: `text` is not a string, or the class does not accept the settings.
        ValueError: `text` is not such a call, has an unknown name or an argument that is not a literal, or a setting
            is invalid.

    Example:
        >>> parse("DropBlock(p=0.2, block_size=5)")
        DropBlock(p=0.2, block_size=5)
        >>> schedule = parse("ChainedSchedule([LinearSchedule(2), ConstantSchedule(0.0)], [4])")
        >>> schedule.simulate(6)
        [0.0, 0.5, 1.0, 1.0, 0.0, 0.0]
    """
    return read(text)


def read(text: str, allow: Allowed = ()) -> Any:
    """Like `parse`, also for the names of the classes and functions in `allow`: full ones, and their own if unique."""
    if not isinstance(text, str):
        raise TypeError(f"parse: text must be a str, got {text!r} ({type(text).__name__}).")
    try:
        node = ast.parse(text.strip(), mode="eval").body
        return _read(node, text, _names_of(allow))
    except (SyntaxError, RecursionError, MemoryError):
        raise _unreadable(text) from None


def text_of(thing: Regularizer | Recipe | Schedule) -> str:
    """Return the text that `read` understands.

    Raises:
        StateError: a setting is not a literal, such as a function in a schedule.
    """
    made = thing._given if isinstance(thing, Regularizer) else thing
    if not isinstance(made, nn.Module | Recipe | Schedule):  # a function
        return qualified_name(made)
    for name in [name for name in init_parameters(type(made)) if not hasattr(made, name)]:  # `*args` is one
        fix = "name each argument, and store it" if name.startswith("*") else f"write: self.{name} = {name}"
        raise StateError(
            f"{thing!r} cannot be saved: {type(made).__name__} does not store its argument {name!r}.\n"
            f"  in {type(made).__name__}.__init__, {fix}"
        )
    if made is not thing:
        text = f"{qualified_name(type(made))}({settings_text(made)})"
    else:
        name, _, settings = repr(thing).partition("(")
        text = f"{name if name in known_names() else qualified_name(type(thing))}({settings}"
    try:
        for node in ast.walk(ast.parse(text, mode="eval")):
            for one in [*node.args, *(k.value for k in node.keywords)] if isinstance(node, ast.Call) else []:
                for part in one.elts if isinstance(one, ast.List | ast.Tuple) else [one]:
                    if not isinstance(part, ast.Call):
                        ast.literal_eval(part)
    except (SyntaxError, ValueError):
        raise StateError(
            f"{text} cannot be saved: a setting is not a literal.\n"
            "  functions can't be saved: keep them in code, and save state_dict() instead."
        ) from None
    return text


def qualified_name(thing: Any) -> str:
    """Return `package.module.Name`, which is compared with the entries of `allow`."""
    if not hasattr(thing, "__qualname__"):
        raise StateError(f"{thing!r} is not a plain function or class: a text cannot name it.")
    return f"{thing.__module__}.{thing.__qualname__}"


def _names_of(allow: Allowed) -> dict[str, Any]:
    """Return what is allowed by full name, and by its own name unless that is ambiguous or one of hookdrop."""
    if not isinstance(allow, Sequence) or isinstance(allow, str):
        raise TypeError(f"allow must be a list of classes and functions, got {allow!r}: write allow=[...].")
    full = {qualified_name(each): each for each in allow}
    count = Counter(each.__name__ for each in full.values())
    own = {each.__name__: each for each in full.values() if count[each.__name__] == 1}
    return {name: each for name, each in own.items() if name not in known_names()} | full


def _read(node: ast.expr, text: str, allowed: dict[str, Any]) -> Any:
    """Create what a node of the text describes: a call by name, or the name of an allowed function."""
    name = ast.unparse(node.func if isinstance(node, ast.Call) else node)
    if not name.replace(".", "_").isidentifier():
        raise _unreadable(text)
    if not isinstance(node, ast.Call):
        if name in allowed and not isinstance(allowed[name], type):
            return allowed[name]
        if name in known_names():
            raise ValueError(
                f"parse: {text!r} lacks its arguments: write '{name}(...)'.{signature_line(name, _named(name))}"
            )
        raise _unreadable(text)
    if name not in known_names() and name not in allowed:
        raise ValueError(_unknown(name, allowed))
    make = allowed.get(name) or _named(name)
    args = [_value(arg, text, allowed) for arg in node.args]
    kwargs = {str(keyword.arg): _value(keyword.value, text, allowed) for keyword in node.keywords}
    if "None" in kwargs or len(kwargs) < len(node.keywords):  # `**`, or a setting twice
        raise _unreadable(text)
    try:
        made, signature = make(*args, **kwargs), inspect.signature(make)
        for setting, value in signature.bind(*args, **kwargs).arguments.items():
            # The classes accept any truthy value for a bool; a text must not.
            if isinstance(signature.parameters[setting].default, bool) and not isinstance(value, bool):
                raise TypeError(f"{setting} must be True or False, got {value!r}")
        return made
    except TypeError as error:
        more = "" if "signature:" in str(error) else f".{signature_line(name, make)}"
        raise TypeError(f"parse: {text!r}: {error}{more}") from None


def _value(node: ast.expr, text: str, allowed: dict[str, Any]) -> Any:
    """The value of a literal, of a call, or of a list of calls."""
    if isinstance(node, ast.Call) and ((name := ast.unparse(node.func)) in allowed or nearest(name, known_names())):
        return _read(node, text, allowed)
    if isinstance(node, ast.List | ast.Tuple) and any(isinstance(part, ast.Call) for part in node.elts):
        return [_value(part, text, allowed) for part in node.elts]
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise ValueError(
            f"parse: {ast.unparse(node)!r} in {text!r} is not a literal; nothing was evaluated.\n  write text in quotes"
        ) from None


def _named(name: str) -> Callable[..., Any]:
    found: Any = REGULARIZERS.get(name) or SCHEDULES.get(name) or RECIPES[name]
    return found  # type: ignore[no-any-return]


def _unknown(name: str, allowed: Mapping[str, Any]) -> str:
    if "." in name:
        own = name.rpartition(".")[2]
        if full := [other for other in allowed if other.endswith(f".{own}")]:
            return f"parse: {name!r} is not a full name.\n  write {full[0]!r}"
        hint = f"write {own!r}, or " if own in known_names() else ""
        return f"parse: {name!r} is not part of hookdrop.\n  {hint}if you trust it: from_dict(..., allow=[{name}])"
    near = nearest(name, known_names())
    hint = f"did you mean: {', '.join(near)}" if near else f"available: {', '.join(known_names())}"
    own = f"your own class: from_dict(..., allow=[{name}])"
    return f"parse: {name!r} is not a hookdrop regularizer, recipe or schedule.\n  {hint}\n  {own}"


def _unreadable(text: str) -> ValueError:
    return ValueError(
        f"parse: cannot parse {text!r}.\n  write a call with literal arguments: "
        f"'DropBlock(p=0.1, block_size=7)'\n  available: {', '.join(known_names())}"
    )

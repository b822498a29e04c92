"""Parse calls written as text (a name with literal arguments) without evaluating them."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hookdrop.errors import nearest


@dataclass(frozen=True)
class CallSyntax:
    """The calls that a parser accepts."""

    reader: str
    """The function or option that parses the text, for messages."""
    title: str
    known: Mapping[str, Callable[..., Any]]
    example: str
    bare: bool = False
    """Whether a name alone is a call without arguments."""
    nested: bool = False
    """Whether arguments may contain such calls; they are returned as `Call`."""


@dataclass(frozen=True)
class Call:
    """A name with its literal arguments."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        arguments = [*map(repr, self.args), *(f"{name}={value!r}" for name, value in self.kwargs)]
        return f"{self.name}({', '.join(arguments)})"


def parse_call(text: str, syntax: CallSyntax) -> Call:
    """Parse `text` into a call.

    Raises:
        TypeError: `text` is not a str.
        ValueError: the text is not a call, the name is unknown, or an argument is a duplicate or not a literal.
    """
    if not isinstance(text, str):
        raise TypeError(f"{syntax.reader}: text must be a str, got {text!r} ({type(text).__name__}).")
    try:
        call = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _unreadable(text, syntax) from None
    if isinstance(call, ast.Name) and syntax.bare:
        call = ast.Call(call, [], [])
    elif isinstance(call, ast.Name) and call.id in syntax.known:
        raise ValueError(
            f"{syntax.reader}: {text!r} has no arguments: write '{call.id}(...)'.{signature_of(call.id, syntax)}"
        )
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise _unreadable(text, syntax)
    name = call.func.id
    if name not in syntax.known:
        raise ValueError(
            f"{syntax.reader}: {name!r} is not a hookdrop {syntax.title}.\n"
            f"  did you mean: {', '.join(nearest(name, syntax.known)) or 'one of these?'}\n"
            f"  available:    {', '.join(syntax.known)}"
        )
    try:
        args = tuple(_value(arg, syntax) for arg in call.args)
        kwargs = tuple((keyword.arg, _value(keyword.value, syntax)) for keyword in call.keywords if keyword.arg)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise ValueError(
            f"{syntax.reader}: {text!r} contains an argument that is not a literal; nothing was evaluated."
        ) from None
    if len(kwargs) != len(call.keywords):
        raise _unreadable(text, syntax)
    names = [setting for setting, _ in kwargs]
    duplicate = next((setting for setting in names if names.count(setting) > 1), None)
    if duplicate:
        raise ValueError(f"{syntax.reader}: {text!r} sets {duplicate!r} more than once: keep one value.")
    return Call(name, args, kwargs)


def _value(node: ast.expr, syntax: CallSyntax) -> Any:
    """The value of a literal; with `nested`, also a `Call`, and lists of calls."""
    if syntax.nested and isinstance(node, ast.Call):
        return parse_call(ast.unparse(node), syntax)
    if syntax.nested and isinstance(node, ast.List | ast.Tuple):
        return [_value(element, syntax) for element in node.elts]
    return ast.literal_eval(node)


def signature_of(name: str, syntax: CallSyntax) -> str:
    """Return a message line with the signature of `name`, without types."""
    signature = inspect.signature(syntax.known[name])
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return f"\n  signature: {name}{signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)}"


def _unreadable(text: str, syntax: CallSyntax) -> ValueError:
    return ValueError(
        f"{syntax.reader}: cannot parse {text!r}.\n  write one name with literal arguments and no module prefix: "
        f"{syntax.example!r}\n  available: {', '.join(syntax.known)}"
    )

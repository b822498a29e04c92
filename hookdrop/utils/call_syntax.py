"""Calls written as text, a name with literal settings: parsed, never evaluated."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hookdrop.errors import nearest


@dataclass(frozen=True)
class Kind:
    """What a text may name."""

    reader: str
    """The function that reads it, for messages."""
    title: str
    known: Mapping[str, Callable[..., Any]]
    example: str
    bare: bool = False
    """Whether a name alone is a call without settings."""


@dataclass(frozen=True)
class Call:
    """A name with its literal settings."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        settings = [*map(repr, self.args), *(f"{name}={value!r}" for name, value in self.kwargs)]
        return f"{self.name}({', '.join(settings)})"


def read_call(text: str, kind: Kind) -> Call:
    """The call that `text` describes.

    Raises:
        TypeError: not a text.
        ValueError: another form, an unknown name, a duplicate setting, or anything that is not a literal.
    """
    if not isinstance(text, str):
        raise TypeError(f"{kind.reader}: text must be a str, got {text!r} ({type(text).__name__}).")
    try:
        call = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _unreadable(text, kind) from None
    if isinstance(call, ast.Name) and kind.bare:
        call = ast.Call(call, [], [])
    elif isinstance(call, ast.Name) and call.id in kind.known:
        raise ValueError(
            f"{kind.reader}: {text!r} has no settings: write '{call.id}(...)'.{signature_of(call.id, kind)}"
        )
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise _unreadable(text, kind)
    name = call.func.id
    if name not in kind.known:
        raise ValueError(
            f"{kind.reader}: {name!r} is not a {kind.title} of hookdrop.\n"
            f"  did you mean: {', '.join(nearest(name, kind.known)) or 'one of these?'}\n"
            f"  there are:    {', '.join(kind.known)}"
        )
    try:
        args = tuple(ast.literal_eval(arg) for arg in call.args)
        kwargs = tuple((keyword.arg, ast.literal_eval(keyword.value)) for keyword in call.keywords if keyword.arg)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise ValueError(f"{kind.reader}: {text!r} has something in it that is not a literal; it is not run.") from None
    if len(kwargs) != len(call.keywords):
        raise _unreadable(text, kind)
    settings = [setting for setting, _ in kwargs]
    duplicate = next((setting for setting in settings if settings.count(setting) > 1), None)
    if duplicate:
        raise ValueError(f"{kind.reader}: {text!r} sets {duplicate!r} more than once: keep one value.")
    return Call(name, args, kwargs)


def signature_of(name: str, kind: Kind) -> str:
    """A line with the arguments of `name`, without types."""
    signature = inspect.signature(kind.known[name])
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return f"\n  it takes: {name}{signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)}"


def _unreadable(text: str, kind: Kind) -> ValueError:
    return ValueError(
        f"{kind.reader}: can't read {text!r}.\n  write one name with literal settings and no prefix: "
        f"{kind.example!r}\n  there are: {', '.join(kind.known)}"
    )

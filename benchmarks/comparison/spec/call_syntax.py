"""Parse regularizers, recipes and schedules written as calls, such as `timm.DropPath(drop_prob=0.1)`, without eval."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import hookdrop


@dataclass(frozen=True)
class Call:
    """A (possibly dotted) name and its settings."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        settings = [*map(repr, self.args), *(f"{name}={value!r}" for name, value in self.kwargs.items())]
        return f"{self.name}({', '.join(settings)})"

    def bind(self, *names: str) -> Call:
        """Return a call with names for its positional settings.

        Raises:
            ValueError: There are more positional settings than names, or one is given twice.
        """
        if len(self.args) > len(names):
            raise ValueError(f"{self} has {len(self.args)} positional settings; at most {len(names)} are allowed.")
        if twice := [name for name in names[: len(self.args)] if name in self.kwargs]:
            raise ValueError(f"{self} sets {twice[0]} twice.")
        return Call(self.name, (), {**dict(zip(names, self.args, strict=False)), **self.kwargs})

    def without(self, *names: str) -> Call:
        """Return a call without these named settings."""
        return Call(self.name, self.args, {name: value for name, value in self.kwargs.items() if name not in names})

    def with_settings(self, **settings: Any) -> Call:
        """Return a call with these settings, placed first."""
        return Call(self.name, self.args, {**settings, **self.without(*settings).kwargs})


def parse_call(text: str) -> Call:
    """Parse a call; a bare name is a call without settings.

    Raises:
        ValueError: The text is not a call, or a setting is not a literal.
    """
    try:
        node = ast.parse(text.strip(), mode="eval").body
        call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
        name = _dotted(call.func)
        args = tuple(ast.literal_eval(arg) for arg in call.args)
        if any(keyword.arg is None for keyword in call.keywords):
            raise ValueError
        kwargs = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise ValueError(
            f"cannot parse {text!r}: write a name with literal settings, such as DropBlock(p=0.1)"
        ) from None
    return Call(name, args, kwargs)


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Name):
        return node.id
    raise ValueError


def parse_schedule(text: str) -> hookdrop.Schedule | None:
    """Parse a schedule, in steps or in fractions of the training; None for `none`.

    A bare `LinearSchedule` covers the whole training.

    Raises:
        ValueError: The schedule does not exist or does not accept these settings.
    """
    if text.strip() == "none":
        return None
    try:
        schedule = hookdrop.parse(f"{text}(1.0)" if text.strip().isidentifier() else text)
    except TypeError as error:
        raise ValueError(str(error)) from None
    if not isinstance(schedule, hookdrop.Schedule):
        raise ValueError(f"{text!r} is not a schedule.")
    return schedule

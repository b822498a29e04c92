"""Regularizers, recipes and schedules spelled as text, as `timm.DropPath(drop_prob=0.1)`: read, never evaluated."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Call:
    """A name, with dots or not, and its settings."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        settings = [*map(repr, self.args), *(f"{name}={value!r}" for name, value in self.kwargs.items())]
        return f"{self.name}({', '.join(settings)})"

    def bound(self, *names: str) -> Call:
        """The same with its positional settings under their names.

        Raises:
            ValueError: there are more of them than names, or one is given twice.
        """
        if len(self.args) > len(names):
            raise ValueError(f"{self} has {len(self.args)} settings without a name, and takes at most {len(names)}.")
        if twice := [name for name in names[: len(self.args)] if name in self.kwargs]:
            raise ValueError(f"{self} sets {twice[0]} twice.")
        return Call(self.name, (), {**dict(zip(names, self.args, strict=False)), **self.kwargs})

    def without(self, *names: str) -> Call:
        """The same without some of the settings that have a name."""
        return Call(self.name, self.args, {name: value for name, value in self.kwargs.items() if name not in names})

    def having(self, **settings: Any) -> Call:
        """The same with some settings first."""
        return Call(self.name, self.args, {**settings, **self.without(*settings).kwargs})


def read(text: str) -> Call:
    """The call that a text spells; a name alone is a call without settings.

    Raises:
        ValueError: another form, or settings that are no literals.
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
        raise ValueError(f"can't read {text!r}: write a name with literal settings, as DropBlock(p=0.1)") from None
    return Call(name, args, kwargs)


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Name):
        return node.id
    raise ValueError

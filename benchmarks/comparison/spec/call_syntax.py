"""Regularizers, recipes and schedules spelled as text, as `timm.DropPath(drop_prob=0.1)`: read, never evaluated."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import hookdrop
from comparison.spec.errors import or_nearest

SCHEDULES = (
    "ConstantSchedule",
    "LinearSchedule",
    "CosineSchedule",
    "ExponentialSchedule",
    "EarlySchedule",
    "LateSchedule",
)
_IN_STEPS = ("steps", "cutoff", "delay")


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


def schedule_of(text: str, steps: int) -> hookdrop.Schedule | None:
    """The schedule for a training of so many optimizer steps; None for `none`.

    `LinearSchedule` is over all steps. A `steps`, `delay` or `cutoff` with a decimal point is a fraction of them:
    `LinearSchedule(steps=0.5)` reaches the full rate after half of the training.

    Raises:
        ValueError: no such schedule, or one that does not take these settings.
    """
    call = read(text)
    if call.name == "none":
        return None
    if call.name not in SCHEDULES:
        raise ValueError(f"no schedule is called {call.name!r}.\n{or_nearest(call.name, ('none', *SCHEDULES))}")
    call = call.bound("cutoff" if call.name in ("EarlySchedule", "LateSchedule") else "steps")
    settings = {name: _in_steps(name, value, steps) for name, value in call.kwargs.items()}
    if call.name in ("LinearSchedule", "CosineSchedule", "ExponentialSchedule"):
        settings.setdefault("steps", steps)
    try:
        schedule: hookdrop.Schedule = getattr(hookdrop, call.name)(**settings)
    except TypeError as error:
        raise ValueError(f"{call}: {error}") from None
    return schedule


def _in_steps(name: str, value: Any, steps: int) -> Any:
    if name not in _IN_STEPS or not isinstance(value, float):
        return value
    if not 0 <= value <= 1:
        raise ValueError(f"{name}={value} is no fraction of the training: from 0.0 to 1.0, or whole optimizer steps.")
    return max(1, round(value * steps)) if name != "delay" else round(value * steps)

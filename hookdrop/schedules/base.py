"""The base class of schedules, and the conversion of fractions of the training to steps."""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from hookdrop.utils.errors import InjectionError
from hookdrop.utils.settings import NamedArguments, settings_text
from hookdrop.utils.validation import count, rate


class Schedule(metaclass=NamedArguments):
    """Base class: `schedule(step)` returns the multiplier of the target rate after `step` optimizer steps.

    To write a custom schedule, subclass this as a frozen dataclass (`repr=False`) and define `__call__`.
    """

    _step_fields: ClassVar[Mapping[str, int]] = {}
    """The fields that hold steps or a fraction of the training, with their minimum in steps."""

    _argument_note = "\n  an int counts optimizer steps (epochs * len(loader)), a float is a fraction of the training"
    _multipliers: ClassVar[Sequence[str]] = ()  # the fields that hold multipliers

    def __post_init__(self) -> None:
        owner = type(self).__name__
        for name in self._multipliers:
            object.__setattr__(self, name, rate(getattr(self, name), name, owner, math.inf))
        for name, low in self._step_fields.items():
            object.__setattr__(self, name, steps_or_fraction(getattr(self, name), name, owner, low))

    @abstractmethod
    def __call__(self, step: int) -> float:
        """Return the multiplier, a finite number of at least 0, after `step` (0, 1, ...) optimizer steps."""

    @property
    def is_relative(self) -> bool:
        """Whether a setting is a fraction of the training, so that the schedule needs `resolve`."""
        return any(isinstance(getattr(self, name), float) for name in self._step_fields)

    def resolve(self, total_steps: int) -> Schedule:
        """Return this schedule for a training of `total_steps` optimizer steps, with fractions converted to steps.

        Example:
            >>> LinearSchedule(steps=0.5, delay=0.1).resolve(1000)
            LinearSchedule(steps=500, delay=100)
        """
        total = count(total_steps, "total_steps", type(self).__name__)
        values = {name: (low, getattr(self, name)) for name, low in self._step_fields.items()}
        steps = {name: max(low, round(at * total)) for name, (low, at) in values.items() if isinstance(at, float)}
        resolved = copy.copy(self) if steps else self
        for name, step in steps.items():
            object.__setattr__(resolved, name, step)
        return resolved

    def simulate(self, n: int, total_steps: int | None = None) -> list[float]:
        """Return the multipliers of steps 0 to n - 1. A schedule with fractions requires `total_steps`.

        Example:
            >>> LinearSchedule(steps=4).simulate(6)
            [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
            >>> LinearSchedule(steps=1.0).simulate(6, total_steps=5)
            [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
        """
        schedule = in_steps(self, total_steps)
        return [schedule(step) for step in range(count(n, "n", type(self).__name__, low=0))]

    @property
    def peak(self) -> float | None:
        """The largest multiplier, or None if it is not known in advance."""
        return None

    @property
    def settles_at(self) -> int | None:
        """The first step from which the multiplier stays constant, or None if it is not known in advance."""
        return None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({settings_text(self, lambda one: True)})"

    def _require_steps(self) -> None:
        if self.is_relative:
            raise InjectionError(
                f"{self!r} is relative to the length of the training, which is not known (a float is a fraction, an "
                "int is a number of optimizer steps).\n"
                "  pass the number of optimizer steps: total_steps=epochs * len(loader) // accumulated_batches"
            )


def in_steps(schedule: Schedule, total_steps: int | None) -> Schedule:
    """Return the schedule with fractions converted to steps, which requires `total_steps`."""
    if total_steps is not None and schedule.is_relative:
        return schedule.resolve(total_steps)
    schedule._require_steps()
    return schedule


def steps_or_fraction(value: object, name: str, owner: str, low: int) -> int | float:
    """Return a valid number of steps (int) or fraction of the training (float)."""
    if not isinstance(value, float):
        return count(value, name, owner, low)
    fraction = float(value)
    if not 0 <= fraction <= 1 or (low and not fraction):
        hint = f"\n  write {name}={int(value)}" if math.isfinite(value) and value == int(value) and value >= low else ""
        interval = "(0, 1]" if low else "[0, 1]"
        raise ValueError(
            f"{owner}: {name} must be an integer number of optimizer steps, or a fraction of the training, a float in "
            f"{interval}; got {value!r}.{hint}"
        )
    return fraction

"""Schedules: pure functions that map the optimizer step to a multiplier of the target rate.

Since keep_prob(t) = 1 - p * s(t), a linear schedule s is the linear keep_prob schedule of the DropBlock paper.

An int is a number of optimizer steps, a float is a fraction of the training: `LinearSchedule(steps=1.0)` ends with the
last step. `inject(..., total_steps=N)` converts fractions to steps.
"""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from hookdrop.core.arguments import NamedArguments, count, one_of, positive, rate, settings_text
from hookdrop.core.errors import InjectionError


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
        """A bound that no multiplier exceeds, mostly the largest one; None if it is not known in advance."""
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
    if total_steps is None:
        schedule._require_steps()
    return schedule if total_steps is None else schedule.resolve(total_steps)


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


# --- the schedules


@dataclass(frozen=True, repr=False)
class ConstantSchedule(Schedule):
    """Keep the multiplier constant; nothing needs to call `step()`.

    Args:
        value: the multiplier, at least 0.
    """

    value: float = 1.0
    settles_at = 0
    _multipliers = ("value",)

    def __call__(self, step: int) -> float:
        return self.value

    @property
    def peak(self) -> float:
        return self.value


@dataclass(frozen=True, repr=False)
class _Switch(Schedule):
    """Switch the rate on or off at step `cutoff`."""

    cutoff: int | float
    peak = 1.0
    _step_fields: ClassVar[Mapping[str, int]] = {"cutoff": 1}

    @property
    def settles_at(self) -> int:
        return int(self.cutoff)


@dataclass(frozen=True, repr=False)
class EarlySchedule(_Switch):
    """Regularize only before step `cutoff`, to reduce underfitting.

    Args:
        cutoff: the first step with multiplier 0, at least 1, or a fraction of the training.
        linear: decrease linearly from 1 to 0 at the cutoff, instead of switching at once.

    Example:
        >>> EarlySchedule(cutoff=2).simulate(4)
        [1.0, 1.0, 0.0, 0.0]
        >>> EarlySchedule(cutoff=2, linear=True).simulate(4)
        [1.0, 0.5, 0.0, 0.0]

    Reference: Liu et al. 2023, "Dropout reduces underfitting", arXiv:2303.01500.
    """

    linear: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self.linear, "linear", "EarlySchedule", (True, False))

    def __call__(self, step: int) -> float:
        self._require_steps()
        if step >= self.cutoff:
            return 0.0
        return 1.0 - step / self.cutoff if self.linear else 1.0


@dataclass(frozen=True, repr=False)
class LateSchedule(_Switch):
    """Regularize from step `cutoff` on, and not before.

    Args:
        cutoff: the first step with multiplier 1, at least 1, or a fraction of the training.

    Example:
        >>> LateSchedule(cutoff=2).simulate(4)
        [0.0, 0.0, 1.0, 1.0]

    Reference: Liu et al. 2023, "Dropout reduces underfitting", arXiv:2303.01500.
    """

    def __call__(self, step: int) -> float:
        self._require_steps()
        return 0.0 if step < self.cutoff else 1.0


@dataclass(frozen=True, repr=False)
class LinearSchedule(Schedule):
    """Interpolate linearly from `start` to `end`, as the DropBlock paper does for keep_prob.

    Args:
        steps: optimizer steps from `start` to `end`, at least 1, or a fraction of the training. The multiplier is
            exactly `end` at `delay + steps`.
        start: multiplier at step 0, at least 0.
        end: final multiplier, at least 0.
        delay: steps at `start` before the ramp begins, or a fraction of the training.

    Example:
        >>> ramp = LinearSchedule(steps=10)
        >>> ramp(0), ramp(5), ramp(10), ramp(1000)
        (0.0, 0.5, 1.0, 1.0)

    Reference: Ghiasi et al. 2018, arXiv:1810.12890, section 3 ("Scheduled DropBlock").
    """

    steps: int | float
    start: float = 0.0
    end: float = 1.0
    delay: int | float = 0
    _multipliers = ("start", "end")
    _step_fields: ClassVar[Mapping[str, int]] = {"steps": 1, "delay": 0}

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.steps, float) and isinstance(self.delay, float) and self.delay + self.steps > 1 + 1e-9:
            raise ValueError(
                f"{type(self).__name__}: the ramp would end after the training: delay + steps = "
                f"{self.delay + self.steps:g} of it.\n  write steps={1 - self.delay:g}"
            )

    def resolve(self, total_steps: int) -> Schedule:
        resolved = super().resolve(total_steps)
        if not (isinstance(self.steps, float) and isinstance(self.delay, float)):
            return resolved
        # Round the end, so that a ramp over the rest of the training does not exceed it.
        delay = round(self.delay * total_steps)
        object.__setattr__(resolved, "steps", max(1, round((self.delay + self.steps) * total_steps) - delay))
        return resolved

    def __call__(self, step: int) -> float:
        self._require_steps()
        done = step - self.delay
        if done <= 0:
            return self.start
        if done >= self.steps:
            return self.end
        return self.start + (self.end - self.start) * self._progress(done / self.steps)

    @staticmethod
    def _progress(fraction: float) -> float:
        """Map the fraction of steps taken (0 to 1) to the fraction of the ramp completed (0 to 1)."""
        return fraction

    @property
    def peak(self) -> float:
        return max(self.start, self.end)

    @property
    def settles_at(self) -> int:
        return 0 if self.start == self.end else int(self.delay + self.steps)


@dataclass(frozen=True, repr=False)
class CosineSchedule(LinearSchedule):
    """Interpolate along half a cosine from `start` to `end`; takes the arguments of `LinearSchedule`.

    Example:
        >>> [round(m, 3) for m in CosineSchedule(steps=4).simulate(5)]
        [0.0, 0.146, 0.5, 0.854, 1.0]
    """

    @staticmethod
    def _progress(fraction: float) -> float:
        return (1.0 - math.cos(math.pi * fraction)) / 2.0


@dataclass(frozen=True, repr=False)
class ExponentialSchedule(Schedule):
    """Rise as 1 - exp(-speed * step / steps): fast at first, approaching 1 asymptotically.

    Args:
        steps: length of the training in optimizer steps, at least 1, or a fraction of it.
        speed: gamma * T in the paper, above 0. At 10, the multiplier of the last step is 0.99995.

    Example:
        >>> round(ExponentialSchedule(steps=100)(10), 3)
        0.632

    Reference: Morerio et al. 2017, "Curriculum dropout", arXiv:1703.06229, equation 2.
    """

    steps: int | float
    speed: float = 10.0
    peak = 1.0
    _step_fields: ClassVar[Mapping[str, int]] = {"steps": 1}

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self.speed, "speed", "ExponentialSchedule")

    def __call__(self, step: int) -> float:
        self._require_steps()
        return -math.expm1(-self.speed * step / self.steps)

    @property
    def settles_at(self) -> int:
        # From here on, 1 - exp(-x) rounds to 1 in double precision.
        return math.ceil(54 * math.log(2) * self.steps / self.speed)


@dataclass(frozen=True, repr=False)
class ChainedSchedule(Schedule):
    """Run schedules one after another, each counting its steps from 0, as torch's `SequentialLR` does.

    Args:
        schedules: the schedules, in order.
        milestones: steps, or fractions of the training, at which the next schedule starts: strictly increasing, one
            fewer than `schedules`.

    Example:
        >>> up_and_off = ChainedSchedule([LinearSchedule(steps=2), ConstantSchedule(0.0)], [4])
        >>> up_and_off.simulate(6)
        [0.0, 0.5, 1.0, 1.0, 0.0, 0.0]
    """

    schedules: Sequence[Schedule]
    milestones: Sequence[int | float]

    def __post_init__(self) -> None:
        schedules = tuple(self.schedules)
        milestones = tuple(steps_or_fraction(m, "milestones", "ChainedSchedule", low=1) for m in self.milestones)
        if not schedules or not all(isinstance(s, Schedule) for s in schedules):
            raise TypeError(f"ChainedSchedule: schedules must be hookdrop schedules, got {self.schedules!r}.")
        mixed = len(set(map(type, milestones))) > 1
        if mixed or len(milestones) != len(schedules) - 1 or list(milestones) != sorted(set(milestones)):
            raise ValueError(
                f"ChainedSchedule: {len(schedules)} schedules need {len(schedules) - 1} increasing milestones, all "
                f"integers or all fractions, got {list(milestones)}."
            )
        object.__setattr__(self, "schedules", schedules)
        object.__setattr__(self, "milestones", milestones)

    @property
    def is_relative(self) -> bool:
        return any(isinstance(m, float) for m in self.milestones) or any(s.is_relative for s in self.schedules)

    def resolve(self, total_steps: int) -> Schedule:
        """Convert fractions of the whole training to steps, also those of the schedules."""
        milestones = [max(1, round(m * total_steps)) if isinstance(m, float) else m for m in self.milestones]
        return ChainedSchedule([schedule.resolve(total_steps) for schedule in self.schedules], milestones)

    def __call__(self, step: int) -> float:
        self._require_steps()
        index = sum(step >= milestone for milestone in self.milestones)
        return self.schedules[index](step - (int(self.milestones[index - 1]) if index else 0))

    @property
    def peak(self) -> float | None:
        peaks = [schedule.peak for schedule in self.schedules if schedule.peak is not None]
        return max(peaks) if len(peaks) == len(self.schedules) else None

    @property
    def settles_at(self) -> int | None:
        last = self.schedules[-1].settles_at
        return None if last is None else last + int(self.milestones[-1] if self.milestones else 0)


@dataclass(frozen=True, repr=False)
class LambdaSchedule(Schedule):
    """Use `fn(step)` as the multiplier.

    Args:
        fn: takes the step (an int) and returns a finite number of at least 0. `inject` requires that it can be
            pickled with the model: use a module-level function, not a lambda.

    Example:
        >>> LambdaSchedule(abs).simulate(3)
        [0.0, 1.0, 2.0]
    """

    fn: Callable[[int], float]

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise TypeError(f"LambdaSchedule: fn must be a function of the step, got {self.fn!r}.")

    def __call__(self, step: int) -> float:
        return rate(self.fn(step), f"fn({step})", "LambdaSchedule", math.inf)


SCHEDULES: dict[str, type[Schedule]] = {
    cls.__name__: cls
    for cls in (
        *(ChainedSchedule, ConstantSchedule, CosineSchedule, EarlySchedule),
        *(ExponentialSchedule, LateSchedule, LinearSchedule),
    )
}
"""The schedules that `parse` can name: all but `LambdaSchedule`, whose function is code."""

__all__ = [*SCHEDULES, "LambdaSchedule", "Schedule"]

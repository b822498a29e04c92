"""Schedules: pure functions that map the optimizer step to a multiplier of the target rate.

Since keep_prob(t) = 1 - p * s(t), a linear schedule s is the linear keep_prob schedule of the DropBlock paper.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass

from hookdrop.utils.validation import count, number, positive


class Schedule(ABC):
    """Base class: `schedule(step)` returns the multiplier of the target rate after `step` optimizer steps.

    To write a custom schedule, subclass this as a frozen dataclass (`repr=False`) and define `__call__`.
    """

    @abstractmethod
    def __call__(self, step: int) -> float:
        """Return the multiplier, a finite number of at least 0, after `step` (0, 1, ...) optimizer steps."""

    def simulate(self, n: int) -> list[float]:
        """Return the multipliers of steps 0 to n - 1.

        Example:
            >>> LinearSchedule(steps=4).simulate(6)
            [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
        """
        return [self(step) for step in range(count(n, "n", type(self).__name__, low=0))]

    @property
    def peak(self) -> float | None:
        """The largest multiplier, or None if it is not known in advance."""
        return None

    @property
    def settles_at(self) -> int | None:
        """The first step from which the multiplier stays constant, or None if it is not known in advance."""
        return None

    def __repr__(self) -> str:
        if not is_dataclass(self):
            return f"{type(self).__name__}()"
        changed = (f for f in fields(self) if getattr(self, f.name) != f.default)
        return f"{type(self).__name__}({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in changed)})"

    def _validate(self, *multipliers: str, **minimums: int) -> None:
        """Validate and convert the named fields: multipliers, and integers with their minimum."""
        owner = type(self).__name__
        for name in multipliers:
            object.__setattr__(self, name, _multiplier(getattr(self, name), name, owner))
        for name, low in minimums.items():
            object.__setattr__(self, name, count(getattr(self, name), name, owner, low))


def _multiplier(value: object, name: str, owner: str) -> float:
    multiplier = number(value, name, owner)
    if multiplier < 0:
        raise ValueError(f"{owner}: {name} must be at least 0, got {multiplier:g}.")
    return multiplier


@dataclass(frozen=True, repr=False)
class ConstantSchedule(Schedule):
    """Keep the multiplier constant; nothing needs to call `step()`.

    Args:
        value: the multiplier, at least 0.
    """

    value: float = 1.0
    settles_at = 0

    def __post_init__(self) -> None:
        self._validate("value")

    def __call__(self, step: int) -> float:
        return self.value

    @property
    def peak(self) -> float:
        return self.value


@dataclass(frozen=True, repr=False)
class _Ramp(Schedule):
    """Go from `start` to `end` in `steps` steps, after `delay` steps at `start`."""

    steps: int
    start: float = 0.0
    end: float = 1.0
    delay: int = 0

    def __post_init__(self) -> None:
        self._validate("start", "end", steps=1, delay=0)

    def __call__(self, step: int) -> float:
        done = step - self.delay
        if done <= 0:
            return self.start
        if done >= self.steps:
            return self.end
        return self.start + (self.end - self.start) * self._progress(done / self.steps)

    @staticmethod
    @abstractmethod
    def _progress(fraction: float) -> float:
        """Map the fraction of steps taken (0 to 1) to the fraction of the ramp completed (0 to 1)."""

    @property
    def peak(self) -> float:
        return max(self.start, self.end)

    @property
    def settles_at(self) -> int:
        return 0 if self.start == self.end else self.delay + self.steps


@dataclass(frozen=True, repr=False)
class LinearSchedule(_Ramp):
    """Interpolate linearly from `start` to `end`, as the DropBlock paper does for keep_prob.

    Args:
        steps: optimizer steps from `start` to `end`, at least 1. The multiplier is exactly `end` at `delay + steps`.
        start: multiplier at step 0, at least 0.
        end: final multiplier, at least 0.
        delay: steps at `start` before the ramp begins.

    Example:
        >>> ramp = LinearSchedule(steps=10)
        >>> ramp(0), ramp(5), ramp(10), ramp(1000)
        (0.0, 0.5, 1.0, 1.0)

    Reference: Ghiasi et al. 2018, arXiv:1810.12890, section 3 ("Scheduled DropBlock").
    """

    @staticmethod
    def _progress(fraction: float) -> float:
        return fraction


@dataclass(frozen=True, repr=False)
class CosineSchedule(_Ramp):
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
        steps: length of the training in optimizer steps, at least 1.
        speed: gamma * T in the paper, above 0. At 10, the multiplier of the last step is 0.99995.

    Example:
        >>> round(ExponentialSchedule(steps=100)(10), 3)
        0.632

    Reference: Morerio et al. 2017, "Curriculum dropout", arXiv:1703.06229, equation 2.
    """

    steps: int
    speed: float = 10.0
    peak = 1.0

    def __post_init__(self) -> None:
        self._validate(steps=1)
        positive(self.speed, "speed", "ExponentialSchedule")

    def __call__(self, step: int) -> float:
        return -math.expm1(-self.speed * step / self.steps)

    @property
    def settles_at(self) -> int:
        # From here on, 1 - exp(-x) rounds to 1 in double precision.
        return math.ceil(54 * math.log(2) * self.steps / self.speed)


@dataclass(frozen=True, repr=False)
class _Switch(Schedule):
    """Switch the rate on or off at step `cutoff`."""

    cutoff: int
    peak = 1.0

    def __post_init__(self) -> None:
        self._validate(cutoff=1)

    @property
    def settles_at(self) -> int:
        return self.cutoff


@dataclass(frozen=True, repr=False)
class EarlySchedule(_Switch):
    """Regularize only before step `cutoff`, to reduce underfitting.

    Args:
        cutoff: the first step with multiplier 0, at least 1.
        linear: decrease linearly from 1 to 0 at the cutoff, instead of switching at once.

    Example:
        >>> EarlySchedule(cutoff=2).simulate(4), EarlySchedule(cutoff=2, linear=True).simulate(4)
        ([1.0, 1.0, 0.0, 0.0], [1.0, 0.5, 0.0, 0.0])

    Reference: Liu et al. 2023, "Dropout reduces underfitting", arXiv:2303.01500.
    """

    linear: bool = False

    def __call__(self, step: int) -> float:
        if step >= self.cutoff:
            return 0.0
        return 1.0 - step / self.cutoff if self.linear else 1.0


@dataclass(frozen=True, repr=False)
class LateSchedule(_Switch):
    """Regularize from step `cutoff` on, and not before.

    Args:
        cutoff: the first step with multiplier 1, at least 1.

    Example:
        >>> LateSchedule(cutoff=2).simulate(4)
        [0.0, 0.0, 1.0, 1.0]

    Reference: Liu et al. 2023, "Dropout reduces underfitting", arXiv:2303.01500.
    """

    def __call__(self, step: int) -> float:
        return 0.0 if step < self.cutoff else 1.0


@dataclass(frozen=True, repr=False)
class ChainedSchedule(Schedule):
    """Run schedules one after another, each counting its steps from 0, as torch's `SequentialLR` does.

    Args:
        schedules: the schedules, in order.
        milestones: steps at which the next schedule starts: strictly increasing, one fewer than `schedules`.

    Example:
        >>> up_and_off = ChainedSchedule([LinearSchedule(steps=2), ConstantSchedule(0.0)], [4])
        >>> up_and_off.simulate(6)
        [0.0, 0.5, 1.0, 1.0, 0.0, 0.0]
    """

    schedules: Sequence[Schedule]
    milestones: Sequence[int]

    def __post_init__(self) -> None:
        schedules = tuple(self.schedules)
        milestones = tuple(count(m, "milestones", "ChainedSchedule") for m in self.milestones)
        if not schedules or not all(isinstance(s, Schedule) for s in schedules):
            raise TypeError(f"ChainedSchedule: schedules must be hookdrop schedules, got {self.schedules!r}.")
        if len(milestones) != len(schedules) - 1 or list(milestones) != sorted(set(milestones)):
            raise ValueError(
                f"ChainedSchedule: {len(schedules)} schedules need {len(schedules) - 1} increasing milestones, "
                f"got {list(milestones)}."
            )
        object.__setattr__(self, "schedules", schedules)
        object.__setattr__(self, "milestones", milestones)

    def __call__(self, step: int) -> float:
        index = sum(step >= milestone for milestone in self.milestones)
        return self.schedules[index](step - (self.milestones[index - 1] if index else 0))

    @property
    def peak(self) -> float | None:
        peaks = [schedule.peak for schedule in self.schedules if schedule.peak is not None]
        return max(peaks) if len(peaks) == len(self.schedules) else None

    @property
    def settles_at(self) -> int | None:
        last = self.schedules[-1].settles_at
        return None if last is None else last + (self.milestones[-1] if self.milestones else 0)


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
        return _multiplier(self.fn(step), f"fn({step})", "LambdaSchedule")

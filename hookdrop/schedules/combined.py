"""Schedules made of other schedules or of a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hookdrop.schedules.base import Schedule, known_steps, multiplier_of, steps_or_fraction


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
        if len(set(map(type, milestones))) > 1:
            raise TypeError(
                f"ChainedSchedule: milestones must be all integers or all fractions, got {list(milestones)}."
            )
        if len(milestones) != len(schedules) - 1 or list(milestones) != sorted(set(milestones)):
            raise ValueError(
                f"ChainedSchedule: {len(schedules)} schedules need {len(schedules) - 1} increasing milestones, "
                f"got {list(milestones)}."
            )
        object.__setattr__(self, "schedules", schedules)
        object.__setattr__(self, "milestones", milestones)

    @property
    def is_relative(self) -> bool:
        return any(isinstance(m, float) for m in self.milestones) or any(s.is_relative for s in self.schedules)

    def resolve(self, total_steps: int) -> Schedule:
        """Convert fractions of the whole training to steps, also those of the schedules."""
        milestones = [round(m * total_steps) if isinstance(m, float) else m for m in self.milestones]
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
        return None if last is None else known_steps(last + (self.milestones[-1] if self.milestones else 0))


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
        return multiplier_of(self.fn(step), f"fn({step})", "LambdaSchedule")

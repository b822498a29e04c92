"""Schedules that rise or fall gradually."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from hookdrop.schedules.base import Schedule, known_steps
from hookdrop.utils.validation import positive


@dataclass(frozen=True, repr=False)
class _Ramp(Schedule):
    """Go from `start` to `end` in `steps` steps, after `delay` steps at `start`."""

    steps: int | float
    start: float = 0.0
    end: float = 1.0
    delay: int | float = 0
    _step_fields: ClassVar[Mapping[str, int]] = {"steps": 1, "delay": 0}

    def __post_init__(self) -> None:
        self._validate("start", "end")
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
        return replace(resolved, steps=max(1, round((self.delay + self.steps) * total_steps) - delay))  # type: ignore[type-var]

    def __call__(self, step: int) -> float:
        self._require_steps()
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
    def settles_at(self) -> int | None:
        return 0 if self.start == self.end else known_steps(self.delay + self.steps)


@dataclass(frozen=True, repr=False)
class LinearSchedule(_Ramp):
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
        self._validate()
        positive(self.speed, "speed", "ExponentialSchedule")

    def __call__(self, step: int) -> float:
        self._require_steps()
        return -math.expm1(-self.speed * step / self.steps)

    @property
    def settles_at(self) -> int | None:
        # From here on, 1 - exp(-x) rounds to 1 in double precision.
        return None if self.is_relative else math.ceil(54 * math.log(2) * self.steps / self.speed)

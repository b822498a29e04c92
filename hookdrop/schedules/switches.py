"""Schedules that are constant, or switch once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from hookdrop.schedules.base import Schedule, known_steps


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
class _Switch(Schedule):
    """Switch the rate on or off at step `cutoff`."""

    cutoff: int | float
    peak = 1.0
    _step_fields: ClassVar[Mapping[str, int]] = {"cutoff": 1}

    def __post_init__(self) -> None:
        self._validate()

    @property
    def settles_at(self) -> int | None:
        return known_steps(self.cutoff)


@dataclass(frozen=True, repr=False)
class EarlySchedule(_Switch):
    """Regularize only before step `cutoff`, to reduce underfitting.

    Args:
        cutoff: the first step with multiplier 0, at least 1, or a fraction of the training.
        linear: decrease linearly from 1 to 0 at the cutoff, instead of switching at once.

    Example:
        >>> EarlySchedule(cutoff=2).simulate(4), EarlySchedule(cutoff=2, linear=True).simulate(4)
        ([1.0, 1.0, 0.0, 0.0], [1.0, 0.5, 0.0, 0.0])

    Reference: Liu et al. 2023, "Dropout reduces underfitting", arXiv:2303.01500.
    """

    linear: bool = False

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

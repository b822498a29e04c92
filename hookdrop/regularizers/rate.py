"""Rates: the numbers that schedules drive."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

from torch import Tensor
from torch.compiler import is_compiling

from hookdrop.utils.validation import as_rate_tensor, rate

if TYPE_CHECKING:
    from hookdrop.regularizers.base import Regularizer

R = TypeVar("R", bound="Regularizer")


@dataclass(frozen=True)
class Rate:
    """The number that a schedule drives: its attribute, its range, and what it means.

    Example:
        >>> Rate("amount", low=-1.0, kind="factor").valid(-0.5, "Shrink")
        -0.5
    """

    attribute: str
    """The attribute of the regularizer, and the argument of its `__init__`."""
    low: float = 0.0
    high: float = 1.0
    neutral: float = 0.0
    """The rate at which the regularizer is the identity."""
    kind: Literal["drop", "noise", "factor"] = "drop"
    """`"drop"`: the expected fraction of dropped elements, so that 1 - rate is the fraction kept. `"noise"`: the
    strength of a change that drops nothing. `"factor"`: any other number."""
    open_end: bool = False
    """Whether the range excludes `high` itself."""

    def __post_init__(self) -> None:
        if not self.low <= self.neutral <= self.high:
            raise ValueError(f"Rate({self.attribute!r}): neutral must lie in [low, high], got {self!r}.")

    def valid(self, value: object, owner: str) -> float:
        """Return `value` as a float, or raise a `ValueError` or `TypeError` that states the valid range."""
        return rate(value, self.attribute, owner, self.high, low=self.low, open_end=self.open_end)

    def argument(self, value: float | Tensor, owner: str) -> float | Tensor:
        """`valid`, but a 0-d tensor in compiled code, because the compiler treats floats as constants."""
        if not is_compiling():
            return self.valid(value, owner)
        return value if isinstance(value, Tensor) else as_rate_tensor(self.valid(value, owner))


P = Rate("p")
"""A drop probability in [0, 1]."""

BELOW_1 = Rate("p", open_end=True)
"""A drop probability in [0, 1)."""

STD = Rate("std", high=math.inf, kind="noise")
"""A standard deviation."""


def rate_of(regularizer: Regularizer) -> float | None:
    """Return the current rate of a regularizer; None if it has none."""
    # Read from the class, because an instance may have an attribute `rate`.
    declared = type(regularizer).rate
    return None if declared is None else float(getattr(regularizer, declared.attribute))


def at_rate(regularizer: R, value: float | None) -> R:
    """Return a copy of a regularizer at another rate, or at the same rate if it has none."""
    twin, declared = copy.deepcopy(regularizer), type(regularizer).rate
    if declared is not None and value is not None:
        setattr(twin, declared.attribute, value)
    return twin

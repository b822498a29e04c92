"""Schedules: pure functions that map the optimizer step to a multiplier of the target rate.

Since keep_prob(t) = 1 - p * s(t), a linear schedule s is the linear keep_prob schedule of the DropBlock paper.

An int is a number of optimizer steps, a float is a fraction of the training: `LinearSchedule(steps=1.0)` ends with the
last step. `inject(..., total_steps=N)` converts fractions to steps.
"""

from hookdrop.schedules.base import Schedule
from hookdrop.schedules.curves import (
    ChainedSchedule,
    ConstantSchedule,
    CosineSchedule,
    EarlySchedule,
    ExponentialSchedule,
    LambdaSchedule,
    LateSchedule,
    LinearSchedule,
)

__all__ = [
    "ChainedSchedule",
    "ConstantSchedule",
    "CosineSchedule",
    "EarlySchedule",
    "ExponentialSchedule",
    "LambdaSchedule",
    "LateSchedule",
    "LinearSchedule",
    "Schedule",
]

SCHEDULES: dict[str, type[Schedule]] = {
    name: globals()[name] for name in __all__ if name not in ("LambdaSchedule", "Schedule")
}
"""The schedules that `parse` can name: all but `LambdaSchedule`, whose function is code."""

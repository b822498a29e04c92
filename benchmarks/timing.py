"""What a training step with each arm costs, against one without."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

import digits
from arms import NONE, Arm
from paired import Trainee

STEPS_IN_TURN = 4


def ratios(arms: Sequence[Arm], seconds: float) -> dict[str, list[float]]:
    """Times of training steps at the final rate over those without a regularizer in the same round.

    The arms take turns, so that a machine that slows down or speeds up does so for all of them.

    Args:
        arms: the arms; `NONE` is taken whether it is among them or not.
        seconds: start no further round after this; there are at least three.
    """
    trainees = {arm.name: _at_final_rate(arm) for arm in (NONE, *arms)}
    for trainee in trainees.values():
        _time(trainee)
    rounds = []
    started = time.perf_counter()
    while len(rounds) < 3 or time.perf_counter() - started < seconds:
        rounds.append({name: _time(trainee) for name, trainee in trainees.items()})
    return {arm.name: [times[arm.name] / times[NONE.name] for times in rounds] for arm in arms}


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def _at_final_rate(arm: Arm) -> Trainee:
    torch.manual_seed(0)
    model = digits.make_model().train()
    optimizer = digits.make_optimizer(model)
    drop = arm.inject(model, optimizer, steps=1)
    if drop:
        drop.seek(1)
    return Trainee(model, optimizer, drop)


def _time(trainee: Trainee) -> float:
    task = digits.load()
    batch = task.pool[: digits.BATCH]
    x_N1HW, y_N = task.x_N1HW[batch], task.y_N[batch]
    started = time.perf_counter()
    for _ in range(STEPS_IN_TURN):
        trainee.step(x_N1HW, y_N)
    return time.perf_counter() - started

"""Schedules are pure functions of the step."""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import nn

from hookdrop import (
    ChainedSchedule,
    ConstantSchedule,
    CosineSchedule,
    Dropout,
    EarlySchedule,
    ExponentialSchedule,
    LambdaSchedule,
    LateSchedule,
    LinearSchedule,
    Schedule,
    inject,
)
from tests.support.models import pair


class TensorSchedule(Schedule):
    """Not a dataclass, and returns a tensor."""

    def __call__(self, step: int) -> Any:
        return torch.tensor(0.5)


def test_schedule_that_is_not_a_dataclass_and_returns_tensors() -> None:
    drop = inject(model := pair(), Dropout(0.5), layers="*.0", schedule=TensorSchedule())
    drop.step()
    assert "TensorSchedule()" in repr(drop)
    assert drop.metrics()["hookdrop/dropout/p"] == 0.25
    assert type(drop.p) is float
    assert drop.state_dict()["schedule"] == "TensorSchedule()"
    assert model is not None


ALL = [
    ConstantSchedule(0.5),
    LinearSchedule(10),
    CosineSchedule(10),
    ExponentialSchedule(10),
    EarlySchedule(4),
    EarlySchedule(4, linear=True),
    LateSchedule(4),
    ChainedSchedule([LinearSchedule(4), ConstantSchedule(0.0)], [6]),
    LambdaSchedule(math.sqrt),
]


@given(
    steps=st.integers(1, 10_000),
    start=st.floats(0, 2),
    end=st.floats(0, 2),
    delay=st.integers(0, 1000),
    ramp=st.sampled_from([LinearSchedule, CosineSchedule]),
)
def test_ramps_start_and_end_exactly(steps: int, start: float, end: float, delay: int, ramp: type[Schedule]) -> None:
    schedule = ramp(steps, start=start, end=end, delay=delay)
    assert schedule(0) == schedule(delay) == start
    assert schedule(delay + steps) == schedule(delay + steps + 1) == schedule(10**9) == end
    low, high = min(start, end), max(start, end)
    assert all(low - 1e-12 <= schedule(delay + steps * k // 7) <= high + 1e-12 for k in range(8))


def test_linear_schedule_matches_the_paper() -> None:
    """keep_prob decreases linearly from 1 to its target."""
    schedule, p = LinearSchedule(steps=1000), 0.1
    keep = [1 - p * m for m in schedule.simulate(1001)]
    expected = torch.linspace(1.0, 0.9, 1001, dtype=torch.float64)
    torch.testing.assert_close(torch.tensor(keep, dtype=torch.float64), expected)


def test_linear_schedule_reaches_the_target_at_its_last_step() -> None:
    """A ramp over T steps reaches its target after T steps, and not one step earlier."""
    for steps in (1, 3, 7, 10, 49, 1000, 12_345):
        assert LinearSchedule(steps)(steps) == 1.0
        assert LinearSchedule(steps)(steps - 1) < 1.0


def test_exponential_schedule_matches_curriculum_dropout() -> None:
    """Keep = (1 - k) exp(-g t) + k with g = 10 / T, Morerio et al. equation 2; it never exceeds the target."""
    keep, total = 0.5, 1000
    for t in (0, 1, 10, 500, 1000, 5000):
        expected = (1 - keep) * math.exp(-10 / total * t) + keep
        assert 1 - (1 - keep) * ExponentialSchedule(total)(t) == pytest.approx(expected)
        assert ExponentialSchedule(total)(t) <= 1


def test_cosine_schedule_is_half_way_after_half_the_steps() -> None:
    assert CosineSchedule(100)(50) == pytest.approx(0.5)
    assert CosineSchedule(100)(1) < LinearSchedule(100)(1)


def test_chained_schedules_count_their_own_steps() -> None:
    chained = ChainedSchedule([LinearSchedule(2), LinearSchedule(4, start=1.0, end=0.0)], milestones=[10])
    assert [chained(step) for step in (0, 1, 2, 9, 10, 12, 14, 99)] == [0, 0.5, 1, 1, 1, 0.5, 0, 0]


@pytest.mark.parametrize("schedule", ALL, ids=repr)
def test_schedules_are_pure_picklable_and_comparable(schedule: Schedule) -> None:
    assert schedule.simulate(20) == [schedule(step) for step in range(20)] == schedule.simulate(20)
    again = pickle.loads(pickle.dumps(schedule))
    assert again == schedule
    assert again.simulate(20) == schedule.simulate(20)
    with pytest.raises(AttributeError):
        schedule.steps = 3


@pytest.mark.parametrize("schedule", ALL, ids=repr)
def test_repr_round_trip(schedule: Schedule) -> None:
    if not isinstance(schedule, LambdaSchedule):
        names = {cls.__name__: cls for cls in map(type, ALL)}
        assert eval(repr(schedule), names) == schedule


@pytest.mark.parametrize("schedule", ALL, ids=repr)
def test_peak_is_the_largest_multiplier(schedule: Schedule) -> None:
    if isinstance(schedule, LambdaSchedule):
        assert schedule.peak is None
        assert ChainedSchedule([schedule], []).peak is None
    else:
        assert max(schedule.simulate(1000)) == pytest.approx(schedule.peak, abs=1e-4)


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: LinearSchedule(0), ValueError, "steps must be at least 1, got 0"),
        (lambda: LinearSchedule(1e4), TypeError, "write steps=10000"),
        (lambda: LinearSchedule(True), TypeError, "must be an integer"),
        (lambda: LinearSchedule("10"), TypeError, "must be an integer"),
        (lambda: LinearSchedule(10, start=-0.1), ValueError, "start must be at least 0"),
        (lambda: LinearSchedule(10, end=float("nan")), ValueError, "end must be finite"),
        (lambda: LinearSchedule(10, delay=-1), ValueError, "delay must be at least 0"),
        (lambda: CosineSchedule(-5), ValueError, "CosineSchedule: steps"),
        (lambda: ExponentialSchedule(10, speed=0), ValueError, "speed must be above 0"),
        (lambda: EarlySchedule(0), ValueError, "cutoff must be at least 1"),
        (lambda: LateSchedule(0.5), TypeError, "cutoff must be an integer"),
        (lambda: ConstantSchedule(-1), ValueError, "value must be at least 0"),
        (lambda: ChainedSchedule([], []), TypeError, "must be hookdrop schedules"),
        (lambda: ChainedSchedule([LinearSchedule(3), abs], [3]), TypeError, "must be hookdrop schedules"),
        (lambda: ChainedSchedule([LinearSchedule(3)], [3]), ValueError, "1 schedules need 0"),
        (lambda: ChainedSchedule([LinearSchedule(3)] * 3, [5, 5]), ValueError, "increasing milestones"),
        (lambda: LambdaSchedule(0.5), TypeError, "must be a function"),
        (lambda: LambdaSchedule(lambda s: -1)(3), ValueError, r"fn\(3\) must be at least 0, got -1"),
        (lambda: LambdaSchedule(lambda s: "x")(3), TypeError, r"fn\(3\) must be a number"),
        (lambda: LinearSchedule(3).simulate(-1), ValueError, "n must be at least 0"),
    ],
)  # fmt: skip
def test_invalid_settings_raise(make: object, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        make()


@dataclass(frozen=True, repr=False)
class Table(Schedule):
    """A custom schedule, defined only at the steps of the training."""

    values: tuple[float, ...]

    def __call__(self, step: int) -> float:
        return self.values[step]

    @property
    def peak(self) -> float:
        return max(self.values)


def test_schedules_are_not_evaluated_beyond_the_training() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    drop = inject(model, Dropout(0.8), layers="0", schedule=Table((0.0, 0.5, 1.0)))
    model(torch.ones(2)).sum().backward()
    assert "is still at step 0 of Table" in drop.check()[0]
    for p in (0.4, 0.8):
        drop.step()
        model(torch.ones(2)).sum().backward()
        assert (drop.p, drop.check()) == (p, [])
    with pytest.raises(IndexError):
        drop.step()
    assert (drop.step_count, drop.p) == (2, 0.8)


@pytest.mark.parametrize("schedule", ALL, ids=repr)
def test_settles_at_is_the_first_constant_step(schedule: Schedule) -> None:
    end = schedule.settles_at
    if end is None:
        assert isinstance(schedule, LambdaSchedule)
        return
    last = schedule(end + 10_000)
    assert all(schedule(step) == last for step in range(end, end + 300))
    assert end == 0 or schedule(end // 2) != last

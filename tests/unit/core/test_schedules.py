"""Schedules are pure functions of the step."""

import math
import pickle
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given
from torch import nn

import hookdrop
from hookdrop import CosineSchedule, Dropout, EarlySchedule, LambdaSchedule, LinearSchedule, Schedule, inject, plan
from tests.support.models import pair


class TensorSchedule(Schedule):
    def __call__(self, step: int) -> Any:
        return torch.tensor(0.5)


def test_schedule_that_is_not_a_dataclass_and_returns_tensors() -> None:
    drop = inject(_model := pair(), Dropout(0.5), layers="*.0", schedule=TensorSchedule())
    drop.step()
    assert "TensorSchedule()" in repr(drop)
    assert (drop.metrics()["hookdrop/dropout/p"], type(drop.p)) == (0.25, float)
    assert "TensorSchedule()" in str(drop.state_dict())


ALL = [
    hookdrop.ConstantSchedule(0.5),
    LinearSchedule(10),
    CosineSchedule(10),
    hookdrop.ExponentialSchedule(10),
    EarlySchedule(4),
    EarlySchedule(4, linear=True),
    hookdrop.LateSchedule(4),
    hookdrop.ChainedSchedule([LinearSchedule(4), hookdrop.ConstantSchedule(0.0)], [6]),
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


def test_curves_match_their_formulas() -> None:
    """Curriculum dropout: keep = (1 - k) exp(-g t) + k with g = 10 / T, Morerio et al. equation 2; it never exceeds the target."""
    keep, total = 0.5, 1000
    assert hookdrop.ConstantSchedule().simulate(2) == [1.0, 1.0]
    assert LinearSchedule(total).simulate(total + 1) == pytest.approx([t / total for t in range(total + 1)])
    cosine = [(1 - math.cos(math.pi * t / total)) / 2 for t in range(total + 1)]
    assert CosineSchedule(total).simulate(total + 1) == pytest.approx(cosine)
    for t in (0, 1, 10, 500, 1000, 5000):
        expected = (1 - keep) * math.exp(-10 / total * t) + keep
        assert 1 - (1 - keep) * hookdrop.ExponentialSchedule(total)(t) == pytest.approx(expected)
        assert hookdrop.ExponentialSchedule(total)(t) <= 1


def test_chained_schedules_count_their_own_steps() -> None:
    chained = hookdrop.ChainedSchedule([LinearSchedule(2), LinearSchedule(4, start=1.0, end=0.0)], milestones=[10])
    assert [chained(step) for step in (0, 1, 2, 9, 10, 12, 14, 99)] == [0, 0.5, 1, 1, 1, 0.5, 0, 0]


@pytest.mark.parametrize("schedule", ALL, ids=repr)
def test_schedules_are_pure_picklable_and_comparable(schedule: Schedule) -> None:
    assert schedule.simulate(20) == [schedule(step) for step in range(20)] == schedule.simulate(20)
    again = pickle.loads(pickle.dumps(schedule))
    assert again == schedule
    assert again.simulate(20) == schedule.simulate(20)
    assert isinstance(schedule, LambdaSchedule) or eval(repr(schedule), vars(hookdrop)) == schedule
    with pytest.raises(AttributeError):
        schedule.steps = 3


@pytest.mark.parametrize("schedule", ALL, ids=repr)
def test_peak_is_the_largest_multiplier(schedule: Schedule) -> None:
    if isinstance(schedule, LambdaSchedule):
        assert schedule.peak is None
        assert hookdrop.ChainedSchedule([schedule], []).peak is None
    else:
        assert max(schedule.simulate(1000)) == pytest.approx(schedule.peak, abs=1e-4)


INVALID = """
LinearSchedule(0); LinearSchedule(1e4); LinearSchedule(10, start=-0.1); LinearSchedule(10, end=float("nan"))
LinearSchedule(10, delay=-1); CosineSchedule(-5); ExponentialSchedule(10, speed=0); EarlySchedule(0); LateSchedule(1.5)
ConstantSchedule(-1); ChainedSchedule([LinearSchedule(3)], [3]); ChainedSchedule([LinearSchedule(3)] * 3, [5, 5])
LambdaSchedule(lambda s: -1)(3); LinearSchedule(3).simulate(-1); LinearSchedule(steps=0.0); LinearSchedule(steps=1.5)
LinearSchedule(steps=1.0, delay=0.1); LinearSchedule(steps=3, delay=-0.1); EarlySchedule(cutoff=float("nan"))
ChainedSchedule([ConstantSchedule()] * 3, [0.5, 0.2]); ChainedSchedule([ConstantSchedule()] * 3, [0.5, 7])
ChainedSchedule([ConstantSchedule()] * 3, [0.50, 0.51]).resolve(4)
"""
OF_ANOTHER_TYPE = """
LinearSchedule(True); LinearSchedule("10"); ChainedSchedule([], []); ChainedSchedule([LinearSchedule(3), abs], [3])
LambdaSchedule(0.5); LambdaSchedule(lambda s: "x")(3)
"""


@pytest.mark.parametrize(("calls", "error"), [(INVALID, ValueError), (OF_ANOTHER_TYPE, TypeError)])
def test_invalid_settings_raise(calls: str, error: type[Exception]) -> None:
    for call in calls.strip().replace("\n", "; ").split("; "):
        with pytest.raises(error):
            eval(call, vars(hookdrop))


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


CHAINED = hookdrop.ChainedSchedule([LinearSchedule(steps=100), hookdrop.ConstantSchedule(0.0)], [160])
FRACTIONS = {
    "LinearSchedule(steps=1.0)": LinearSchedule(steps=200),
    "LinearSchedule(steps=0.25, start=0.5)": LinearSchedule(steps=50, start=0.5),
    "LinearSchedule(steps=0.9, delay=0.1)": LinearSchedule(steps=180, delay=20),
    "LinearSchedule(steps=30, delay=0.1)": LinearSchedule(steps=30, delay=20),
    "CosineSchedule(steps=0.5, delay=7)": CosineSchedule(steps=100, delay=7),
    "ExponentialSchedule(steps=1.0)": hookdrop.ExponentialSchedule(steps=200),
    "EarlySchedule(cutoff=0.3)": EarlySchedule(cutoff=60),
    "LateSchedule(cutoff=0.3)": hookdrop.LateSchedule(cutoff=60),
    **{
        f"ChainedSchedule([LinearSchedule(steps=0.5), ConstantSchedule(0.0)], milestones=[{milestone}])": CHAINED
        for milestone in (0.8, 160)
    },
}


class TestFractions:
    """A float is a fraction of the training, an int is a number of optimizer steps."""

    @pytest.mark.parametrize("text", FRACTIONS)
    def test_fractions_resolve_to_steps(self, text: str) -> None:
        schedule, in_steps = eval(text, vars(hookdrop)), FRACTIONS[text]
        assert (schedule.is_relative, in_steps.is_relative) == (True, False)
        assert schedule.resolve(200) == in_steps.resolve(7) == in_steps
        assert schedule.simulate(210, total_steps=200) == in_steps.simulate(210)
        for use in (lambda: schedule(3), lambda: schedule.simulate(3)):
            with pytest.raises(hookdrop.InjectionError, match="total_steps="):
                use()

    @given(st.floats(0, 1), st.integers(1, 10**6))
    def test_a_ramp_over_the_rest_of_the_training_ends_with_it(self, delay: float, total: int) -> None:
        assume(delay < 1 - 1e-6)
        schedule = LinearSchedule(steps=1 - delay, delay=delay).resolve(total)
        assert schedule.settles_at is not None
        assert schedule.settles_at <= max(total, round(delay * total) + 1)
        assert schedule(max(total, schedule.settles_at)) == 1.0

    @given(st.floats(0, 1, exclude_min=True), st.integers(1, 1000))
    def test_at_least_one_step_remains(self, fraction: float, total: int) -> None:
        assert LinearSchedule(steps=fraction).resolve(total).settles_at >= 1
        assert EarlySchedule(cutoff=fraction).resolve(total)(0) == 1.0


class TestTotalSteps:
    def test_plan_shows_fractions_and_steps(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2))
        planned = plan(model, Dropout(0.2), layers="0", schedule=LinearSchedule(steps=0.5), total_steps=50)
        assert str(planned).startswith("1 site of Sequential, LinearSchedule(steps=0.5) = LinearSchedule(steps=25)\n")
        assert planned.schedule == LinearSchedule(steps=25)

    @pytest.mark.parametrize("total", [0, -1, 2.5, "10", float("inf")])
    def test_an_invalid_total_raises(self, total: object) -> None:
        schedule = LinearSchedule(steps=0.5)
        with pytest.raises((TypeError, ValueError), match="total_steps must be"):
            inject(nn.Linear(2, 2), Dropout(0.2), layers=nn.Linear, schedule=schedule, total_steps=total)

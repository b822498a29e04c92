"""Schedules are pure functions of the step."""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given
from torch import nn

from hookdrop import (
    ChainedSchedule,
    ConstantSchedule,
    CosineSchedule,
    Dropout,
    EarlySchedule,
    ExponentialSchedule,
    InjectionError,
    LambdaSchedule,
    LateSchedule,
    LinearSchedule,
    Schedule,
    inject,
    plan,
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
    assert "TensorSchedule()" in str(drop.state_dict())
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
        (lambda: LinearSchedule(1e4), ValueError, "write steps=10000"),
        (lambda: LinearSchedule(True), TypeError, "must be an integer"),
        (lambda: LinearSchedule("10"), TypeError, "must be an integer"),
        (lambda: LinearSchedule(10, start=-0.1), ValueError, "start must lie in .0, inf"),
        (lambda: LinearSchedule(10, end=float("nan")), ValueError, "end must be finite"),
        (lambda: LinearSchedule(10, delay=-1), ValueError, "delay must be at least 0"),
        (lambda: CosineSchedule(-5), ValueError, "CosineSchedule: steps"),
        (lambda: ExponentialSchedule(10, speed=0), ValueError, "speed must be above 0"),
        (lambda: EarlySchedule(0), ValueError, "cutoff must be at least 1"),
        (lambda: LateSchedule(1.5), ValueError, "cutoff must be an integer"),
        (lambda: ConstantSchedule(-1), ValueError, "value must lie in"),
        (lambda: ChainedSchedule([], []), TypeError, "must be hookdrop schedules"),
        (lambda: ChainedSchedule([LinearSchedule(3), abs], [3]), TypeError, "must be hookdrop schedules"),
        (lambda: ChainedSchedule([LinearSchedule(3)], [3]), ValueError, "1 schedules need 0"),
        (lambda: ChainedSchedule([LinearSchedule(3)] * 3, [5, 5]), ValueError, "increasing milestones"),
        (lambda: LambdaSchedule(0.5), TypeError, "must be a function"),
        (lambda: LambdaSchedule(lambda s: -1)(3), ValueError, r"fn\(3\) must lie in .0, inf\), got -1"),
        (lambda: LambdaSchedule(lambda s: "x")(3), TypeError, r"fn\(3\) must be a number"),
        (lambda: LinearSchedule(3).simulate(-1), ValueError, "n must be at least 0"),
        (lambda: LinearSchedule(steps=0.0), ValueError, r"a float in \(0, 1\]; got 0.0"),
        (lambda: LinearSchedule(steps=1.5), ValueError, r"got 1.5"),
        (lambda: LinearSchedule(steps=1.0, delay=0.1), ValueError, "would end after the training: delay .* 1.1(?s:.)*write steps=0.9"),
        (lambda: LinearSchedule(steps=3, delay=-0.1), ValueError, r"a float in \[0, 1\]; got -0.1"),
        (lambda: EarlySchedule(cutoff=float("nan")), ValueError, "got nan"),
        (lambda: ChainedSchedule([ConstantSchedule()] * 3, [0.5, 0.2]), ValueError, "increasing milestones"),
        (lambda: ChainedSchedule([ConstantSchedule()] * 3, [0.5, 7]), ValueError, r"all integers or all fractions, got \[0.5, 7\]"),
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


FRACTIONS = {
    "LinearSchedule(steps=1.0)": LinearSchedule(steps=200),
    "LinearSchedule(steps=0.25, start=0.5)": LinearSchedule(steps=50, start=0.5),
    "LinearSchedule(steps=0.9, delay=0.1)": LinearSchedule(steps=180, delay=20),
    "LinearSchedule(steps=30, delay=0.1)": LinearSchedule(steps=30, delay=20),
    "CosineSchedule(steps=0.5, delay=7)": CosineSchedule(steps=100, delay=7),
    "ExponentialSchedule(steps=1.0)": ExponentialSchedule(steps=200),
    "EarlySchedule(cutoff=0.3)": EarlySchedule(cutoff=60),
    "LateSchedule(cutoff=0.3)": LateSchedule(cutoff=60),
    "ChainedSchedule([LinearSchedule(steps=0.5), ConstantSchedule(0.0)], milestones=[0.8])": ChainedSchedule(
        [LinearSchedule(steps=100), ConstantSchedule(0.0)], [160]
    ),
    "ChainedSchedule([LinearSchedule(steps=0.5), ConstantSchedule(0.0)], milestones=[160])": ChainedSchedule(
        [LinearSchedule(steps=100), ConstantSchedule(0.0)], [160]
    ),
}


class TestFractions:
    """A float is a fraction of the training, an int is a number of optimizer steps."""

    @pytest.mark.parametrize("text", FRACTIONS)
    def test_fractions_resolve_to_steps(self, text: str) -> None:
        schedule = eval(text)
        assert schedule.is_relative
        assert schedule.resolve(200) == FRACTIONS[text]
        assert schedule.simulate(210, total_steps=200) == FRACTIONS[text].simulate(210)

    @pytest.mark.parametrize("text", FRACTIONS)
    def test_a_schedule_in_steps_does_not_depend_on_the_total(self, text: str) -> None:
        schedule = FRACTIONS[text]
        assert not schedule.is_relative
        assert schedule.resolve(7) == schedule

    @pytest.mark.parametrize("text", FRACTIONS)
    def test_a_fraction_without_a_total_raises_with_the_fix(self, text: str) -> None:
        schedule = eval(text)
        for use in (lambda: schedule(3), lambda: schedule.simulate(3)):
            with pytest.raises(InjectionError, match=r"relative to the length of the training(?s:.)*total_steps="):
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

    def test_milestones_that_coincide_in_a_short_training_raise(self) -> None:
        schedule = ChainedSchedule([ConstantSchedule()] * 3, [0.50, 0.51])
        with pytest.raises(ValueError, match=r"increasing milestones.* got \[2, 2\]"):
            schedule.resolve(4)


class TestTotalSteps:
    def test_inject_resolves_fractions(self) -> None:
        drop = inject(
            nn.Linear(2, 2), Dropout(0.2), layers=nn.Linear, schedule=LinearSchedule(steps=1.0), total_steps=50
        )
        assert drop.schedule == drop.spec.schedule == LinearSchedule(steps=50)
        drop.seek(25)
        assert drop.p == pytest.approx(0.1)

    def test_plan_shows_fractions_and_steps(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2))
        planned = plan(model, Dropout(0.2), layers="0", schedule=LinearSchedule(steps=0.5), total_steps=50)
        assert str(planned).startswith("1 site of Sequential, LinearSchedule(steps=0.5) = LinearSchedule(steps=25)\n")
        assert planned.schedule == LinearSchedule(steps=25)

    @pytest.mark.parametrize("total", [0, -1, 2.5, "10", float("inf")])
    def test_an_invalid_total_raises(self, total: object) -> None:
        with pytest.raises((TypeError, ValueError), match="total_steps must be"):
            inject(
                nn.Linear(2, 2), Dropout(0.2), layers=nn.Linear, schedule=LinearSchedule(steps=0.5), total_steps=total
            )

"""`set_dropout(schedule=...)`: the rates of a model's built-in dropout, driven like those of an injection."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hookdrop import (
    ConstantSchedule,
    Dropout,
    EarlySchedule,
    HookdropWarning,
    InjectionError,
    LambdaSchedule,
    LateSchedule,
    LinearSchedule,
    Schedule,
    StateError,
    inject,
)
from hookdrop.recipes import DropoutChange, report_dropout, set_dropout
from tests.support.models import ROWS
from tests.support.training import sgd


class Attention(nn.Module):
    """Reads its rate from an attribute at each call, as the attention of transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_dropout = 0.0
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.linear(x), self.attention_dropout, self.training)


def slowly(step: int) -> float:
    return 1 / (1 + step)


@pytest.fixture
def model() -> Any:
    return nn.Sequential(Attention(), nn.Dropout(0.1), nn.Dropout(0.3))


def rates(model: nn.Module) -> list[float]:
    return [rate.value for rate in report_dropout(model).rates]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(ROWS).sum().backward()
        optimizer.step()


class TestRates:
    @pytest.mark.parametrize(
        "schedule",
        [
            LinearSchedule(10, delay=2),
            EarlySchedule(4),
            EarlySchedule(4, linear=True),
            LateSchedule(4),
            ConstantSchedule(0.5),
            LambdaSchedule(slowly),
        ],
        ids=lambda value: repr(value).split(" at 0x")[0],
    )
    def test_rate_is_the_target_times_the_schedule_at_each_step(self, model: Any, schedule: Schedule) -> None:
        """As for an injection with the same target and schedule."""
        twin = nn.Sequential(nn.Identity())
        injection = inject(twin, Dropout(0.6), layers="0", schedule=schedule)
        twin(torch.ones(2))
        change = set_dropout(model, {"0.*": 0.6, "1": lambda name, rate: rate * 2}, schedule)
        for step in range(15):
            assert model[0].attention_dropout == injection.p == 0.6 * schedule(step)
            assert rates(model)[1:] == [0.2 * schedule(step), 0.3]
            assert change.step_count == step
            change.step()
            injection.step()
        change.remove()
        assert rates(model) == [0.0, 0.1, 0.3]

    def test_fractions_of_the_training_need_total_steps(self, model: Any) -> None:
        with pytest.raises(InjectionError, match="is relative to the length of the training"):
            set_dropout(model, 0.5, "EarlySchedule(cutoff=0.3)")
        assert rates(model) == [0.0, 0.1, 0.3]
        change = set_dropout(model, 0.5, "EarlySchedule(cutoff=0.3)", total_steps=10)
        assert change.schedule == EarlySchedule(cutoff=3)
        assert rates(model) == [0.5] * 3
        change.step(3)
        assert rates(model) == [0.0] * 3

    def test_target_equal_to_the_old_rate_is_scheduled_too(self, model: Any) -> None:
        set_dropout(model, {"1": 0.1}, LateSchedule(5))
        assert rates(model) == [0.0, 0.0, 0.3]

    def test_peak_out_of_range_raises_and_changes_nothing(self, model: Any) -> None:
        text = r"set_dropout, '1': p must lie in \[0, 1\], got 1.2.*\n  at '1': p 0.6 x schedule 2"
        with pytest.raises(ValueError, match=text):
            set_dropout(model, {"0.*": 0.5, "1": 0.6}, LinearSchedule(10, end=2.0))
        assert rates(model) == [0.0, 0.1, 0.3]

    def test_rate_out_of_range_without_a_known_peak_raises_and_keeps_the_step(self, model: Any) -> None:
        change = set_dropout(model, 0.5, LambdaSchedule(lambda step: step))
        change.step(2)
        with pytest.raises(ValueError, match="No rate was changed"):
            change.step()
        assert (change.step_count, rates(model)) == (2, [1.0] * 3)

    @pytest.mark.parametrize(
        ("given", "text"),
        [
            (
                LinearSchedule,
                r"set_dropout: schedule must be a hookdrop schedule.*\n  write: schedule=LinearSchedule\(st",
            ),
            (0.5, "write: schedule=LinearSchedule"),
            ("LinearSchedul(3)", "LinearSchedule"),
        ],
    )
    def test_invalid_schedule_raises(self, model: Any, given: Any, text: str) -> None:
        with pytest.raises((TypeError, ValueError), match=text):
            set_dropout(model, 0.5, given)
        assert rates(model) == [0.0, 0.1, 0.3]

    def test_training_drops_at_the_current_rate(self) -> None:
        model, x = nn.Sequential(nn.Dropout(0.1)), torch.ones(20_000)
        change = set_dropout(model, 0.8, LinearSchedule(4))
        for step in range(5):
            change.seek(step)
            dropped = float((model(x) == 0).float().mean())
            assert dropped == pytest.approx(0.2 * step, abs=0.018)  # 5 standard errors

    def test_disable_sets_the_rates_to_0_while_the_schedule_continues(self, model: Any) -> None:
        change = set_dropout(model, 0.5, LinearSchedule(10))
        change.disable()
        change.step(5)
        assert rates(model) == [0.0] * 3
        change.enable()
        assert rates(model) == [0.25] * 3

    def test_repr_and_rates_show_the_current_step(self, model: Any) -> None:
        change = set_dropout(model, {"1": 0.5}, LinearSchedule(10))
        change.step(2)
        assert repr(change) == "<1 rate changed: '1' 0.1 -> 0.1; step 2 of LinearSchedule(steps=10)>"
        change.step()
        assert change.rates == {"1": (0.1, 0.15)}


class TestSteps:
    def test_follow_counts_the_steps_of_the_optimizer(self, model: Any) -> None:
        optimizer = sgd(model)
        change = set_dropout(model, 0.5, LinearSchedule(10)).follow(optimizer)
        assert change.follow(optimizer) is change
        train(model, optimizer, 3)
        assert (change.step_count, rates(model)) == (3, [0.15] * 3)
        change.follow(None)
        train(model, optimizer, 1)
        assert change.step_count == 3

    def test_step_while_following_raises(self, model: Any) -> None:
        change = set_dropout(model, 0.5, LinearSchedule(10)).follow(optimizer := sgd(model))
        with pytest.raises(InjectionError, match=r"'set_dropout' follows an optimizer(.|\n)*Still at step 0"):
            change.step()
        assert rates(model) == [0.0] * 3
        train(model, optimizer, 1)
        change.follow(None)
        change.step()
        assert change.step_count == 2

    def test_following_two_optimizers_raises(self, model: Any) -> None:
        change = set_dropout(model, 0.5, LinearSchedule(10)).follow(first := sgd(model))
        with pytest.raises(InjectionError, match=r"already follows an optimizer \(SGD\)"):
            change.follow(sgd(model))
        train(model, first, 1)
        assert change.step_count == 1

    def test_optimizer_of_another_model_warns(self, model: Any) -> None:
        with pytest.warns(HookdropWarning, match="trains no parameter of this model"):
            set_dropout(model, 0.5, LinearSchedule(10)).follow(sgd(nn.Linear(2, 2)))

    def test_wrapped_model_follows_the_optimizer_of_the_inner_model(self, model: Any) -> None:
        optimizer = sgd(model)
        change = set_dropout(nn.DataParallel(model), 0.5, LinearSchedule(10)).follow(optimizer)
        gc.collect()  # the wrapper is gone
        train(model, optimizer, 2)
        assert (change.step_count, rates(model)) == (2, [0.1] * 3)

    def test_constant_schedule_counts_steps_as_an_injection_does(self, model: Any) -> None:
        change = set_dropout(model, 0.5)
        change.step(3)
        change.seek(7)
        assert (change.step_count, change.schedule, rates(model)) == (7, ConstantSchedule(), [0.5] * 3)

    @pytest.mark.parametrize("bad", [-1, 1.5, "3", None, True])
    def test_invalid_steps_raise(self, model: Any, bad: Any) -> None:
        change = set_dropout(model, 0.5, LinearSchedule(10))
        for call in (change.seek, change.step):
            with pytest.raises((TypeError, ValueError), match=r"step: n|seek: step"):
                call(bad)
        assert change.step_count == 0

    @pytest.mark.parametrize(
        "call",
        [
            DropoutChange.step,
            lambda change: change.seek(1),
            lambda change: change.follow(None),
            DropoutChange.disable,
            DropoutChange.state_dict,
            lambda change: change.load_state_dict({}),
        ],
    )
    def test_calls_after_remove_raise(self, model: Any, call: Callable[[DropoutChange], Any]) -> None:
        change = set_dropout(model, 0.5, LinearSchedule(10))
        change.remove()
        with pytest.raises(InjectionError, match=r"\(\): 'set_dropout' was removed(.|\n)*call set_dropout\(\) again"):
            call(change)
        assert rates(model) == [0.0, 0.1, 0.3]

    def test_optimizer_does_not_count_after_remove(self, model: Any) -> None:
        optimizer = sgd(model)
        with set_dropout(model, 0.5, LinearSchedule(10)).follow(optimizer) as change:
            train(model, optimizer, 2)
        train(model, optimizer, 1)
        assert (change.step_count, rates(model)) == (2, [0.0, 0.1, 0.3])


class TestWarnings:
    def test_schedule_that_is_not_advancing_warns(self, model: Any) -> None:
        """Even if the program did not keep the handle."""
        set_dropout(model, 0.5, LinearSchedule(10))
        gc.collect()
        with pytest.warns(HookdropWarning, match=r"'set_dropout' is still at step 0 of LinearSchedule\(steps=10\)"):
            train(model, sgd(model), 25)

    def test_remove_warns_of_a_schedule_that_never_advanced(self, model: Any) -> None:
        change = set_dropout(model, 0.5, LinearSchedule(10))
        train(model, sgd(model), 2)
        with pytest.warns(HookdropWarning, match="is not advancing"):
            change.remove()
        assert rates(model) == [0.0, 0.1, 0.3]

    def test_an_error_in_the_block_is_not_followed_by_that_warning(self, model: Any) -> None:
        with pytest.raises(KeyError), set_dropout(model, 0.5, LinearSchedule(10)):
            train(model, sgd(model), 2)
            raise KeyError
        assert rates(model) == [0.0, 0.1, 0.3]

    def test_resumed_optimizer_warns(self, model: Any) -> None:
        optimizer = torch.optim.Adam(model.parameters())
        train(model, optimizer, 3)
        set_dropout(model, 0.5, LinearSchedule(10)).follow(optimizer)
        with pytest.warns(HookdropWarning, match=r"the schedule is starting over(.|\n)*drop.seek\(3\)"):
            train(model, optimizer, 1)

    def test_later_change_wins_and_the_schedule_continues_after_it(self, model: Any) -> None:
        change = set_dropout(model, 0.5, LinearSchedule(10))
        with set_dropout(model, {"1": 0.9}):
            with pytest.warns(HookdropWarning, match="the schedule left out 1 rate that changed again since: '1'"):
                change.step(2)
            change.step()  # the warning is raised once
            assert rates(model) == [0.15, 0.9, 0.15]
        change.step()
        assert rates(model) == [0.2] * 3
        change.remove()
        assert rates(model) == [0.0, 0.1, 0.3]

    def test_rate_changed_afterward_is_not_restored_and_warns(self, model: Any) -> None:
        change = set_dropout(model, 0.5, LinearSchedule(10))
        change.step()
        model[1].p = 0.7
        with pytest.warns(HookdropWarning, match=r"did not restore 1 rate that changed again since: '1'"):
            change.remove()
        assert rates(model) == [0.0, 0.7, 0.3]


class TestState:
    def test_resumed_training_continues_at_the_same_rates(self, model: Any) -> None:
        change = set_dropout(model, {"0.*": 0.2, "1": 0.4}, LinearSchedule(10))
        change.step(5)
        state = json.loads(json.dumps(change.state_dict()))
        twin = nn.Sequential(Attention(), nn.Dropout(0.1), nn.Dropout(0.3))
        resumed = set_dropout(twin, {"0.*": 0.2, "1": 0.4}, LinearSchedule(10))
        resumed.load_state_dict(state)
        assert (resumed.step_count, rates(twin)) == (5, rates(model))
        assert resumed.state_dict() == change.state_dict()
        resumed.remove()
        assert rates(twin) == [0.0, 0.1, 0.3]

    def test_state_is_that_of_an_injection(self, model: Any) -> None:
        """The same keys, so that the same tools read it."""
        injection = inject(nn.Sequential(nn.Identity()), Dropout(0.5), layers="0")
        state = set_dropout(model, {"1": 0.5}, LinearSchedule(10)).state_dict()
        assert state.keys() == injection.state_dict().keys()
        assert (state["version"], state["sites"], state["target_p"]) == (1, ["1"], [0.5])

    @pytest.mark.parametrize(
        "wrong",
        [
            {},
            {"version": 2},
            {"step_count": -1},
            {"sites": ["1", "9"]},
            {"sites": ["1"]},
            {"target_p": [0.5, 1.5]},
            {"target_p": [0.5, "x"]},
            {"enabled": 1},
            {"name": "dropout"},
        ],
    )
    def test_invalid_state_raises_and_loads_nothing(self, model: Any, wrong: dict[str, Any]) -> None:
        change = set_dropout(model, {"1": 0.5, "2": 0.5}, LinearSchedule(10))
        change.step(2)
        state = change.state_dict() | {"step_count": 5} | wrong if wrong else wrong
        with pytest.raises(StateError, match="Nothing was loaded"):
            change.load_state_dict(state)
        assert (change.step_count, rates(model)) == (2, [0.0, 0.1, 0.1])
        assert change.state_dict()["target_p"] == [0.5, 0.5]

    def test_target_beyond_the_peak_raises_and_loads_nothing(self, model: Any) -> None:
        change = set_dropout(model, {"1": 0.2}, LinearSchedule(10, end=3.0))
        with pytest.raises(StateError, match=r"p 0.5 x schedule 3(.|\n)*Nothing was loaded"):
            change.load_state_dict(change.state_dict() | {"target_p": [0.5], "declared_p": [0.2]})
        assert change.state_dict()["target_p"] == [0.2]

    def test_other_rate_in_the_code_warns_and_names_the_way_out(self, model: Any) -> None:
        state = set_dropout(copy.deepcopy(model), {"1": 0.4}, LinearSchedule(10)).state_dict() | {"step_count": 5}
        change = set_dropout(model, {"1": 0.2}, LinearSchedule(10))
        with pytest.warns(HookdropWarning, match=r"changed from 0.4 to 0.2.\n.*drop.seek\(5\) instead"):
            change.load_state_dict(state)
        assert model[1].p == 0.2  # half of the state's target
        change.seek(10)
        assert model[1].p == 0.4

    def test_state_of_other_names_loads_what_matches_if_not_strict(self, model: Any) -> None:
        state = set_dropout(copy.deepcopy(model), {"1": 0.4, "2": 0.4}).state_dict() | {"step_count": 5}
        change = set_dropout(model, {"1": 0.4}, LinearSchedule(10))
        with pytest.raises(StateError, match="only in the state: '2'"):
            change.load_state_dict(state)
        with pytest.warns(HookdropWarning):
            change.load_state_dict(state, strict=False)
        assert rates(model) == [0.0, 0.2, 0.3]


class TestLifetime:
    def test_followed_optimizer_does_not_keep_the_model_alive(self) -> None:
        model, kept = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)), nn.Linear(8, 8)
        optimizer = torch.optim.SGD([*model.parameters(), *kept.parameters()], 0.1)
        change = set_dropout(model, 0.5, LinearSchedule(10)).follow(optimizer)
        gone = weakref.ref(model[1])
        del model
        gc.collect()
        assert gone() is None
        train(kept, optimizer, 3)
        assert change.step_count == 1  # then it stops counting
        with pytest.raises(InjectionError, match="the model that set_dropout changed was deleted"):
            change.follow(None).follow(sgd(kept))
        change.remove()

    def test_deleted_part_is_skipped(self, model: Any) -> None:
        change = set_dropout(model, 0.5, LinearSchedule(10))
        model[1] = nn.Identity()
        gc.collect()
        change.step(10)
        assert rates(model) == [0.5, 0.5]
        change.remove()
        assert rates(model) == [0.0, 0.3]

    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
    def test_copy_of_model_and_handle_drives_the_copy(self, model: Any, copied: Callable[[Any], Any]) -> None:
        change = set_dropout(model, 0.5, LinearSchedule(10)).follow(sgd(model))
        change.seek(2)
        twin, other = copied((model, change))
        other.step(3)  # the copy follows no optimizer
        assert (rates(model), rates(twin)) == ([0.1] * 3, [0.25] * 3)
        other.remove()
        assert (rates(model), rates(twin)) == ([0.1] * 3, [0.0, 0.1, 0.3])

    def test_copy_of_the_model_keeps_its_rates(self, model: Any) -> None:
        change = set_dropout(model, 0.5, LinearSchedule(10))
        change.step(2)
        average = copy.deepcopy(model)
        change.step(2)
        assert (rates(average), rates(model)) == ([0.1] * 3, [0.2] * 3)

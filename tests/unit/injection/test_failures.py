"""Failed operations leave the model and its injections unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hookdrop import (
    Dropout,
    GaussianNoise,
    HookdropWarning,
    InjectionError,
    LinearSchedule,
    StateError,
    find,
    inject,
)
from tests.support.nets import Small
from tests.support.pairs import ROWS, _sgd, pair


class TestFailures:
    def test_loading_rates_out_of_range_changes_nothing(self) -> None:
        drop = inject(model := pair(), Dropout(0.3), layers="*.0", p_scale={"0.0": 2.0})
        before = drop.state_dict()
        with pytest.raises(StateError, match="must lie in"):
            drop.load_state_dict(before | {"target_p": [0.9, 0.9], "step_count": 77, "enabled": False})
        assert drop.state_dict() == before
        assert len(find(model)) == 1

    def test_loading_rates_for_sites_without_a_rate_raises(self) -> None:
        drop = inject(model := pair(), torch.relu, layers="*.0")
        saved = drop.state_dict() | {"target_p": [0.1, 0.1]}
        with pytest.raises(StateError, match="which has none. Nothing was loaded"):
            drop.load_state_dict(saved)
        assert len(find(model)) == 1

    def test_remove_removes_hooks_even_if_a_warning_raises(self) -> None:
        model = pair()
        drop = inject(model, Dropout(0.5), layers="*.0", schedule=LinearSchedule(10))
        model(ROWS)
        with pytest.raises(HookdropWarning, match="its schedule is not advancing"):
            drop.remove()
        assert find(model) == ()

    def test_error_inside_a_with_block_propagates_and_hooks_are_removed(self) -> None:
        model = pair()
        with pytest.raises(KeyError), inject(model, Dropout(0.5), layers="*.0", schedule=LinearSchedule(10)):
            model(ROWS)
            raise KeyError
        assert find(model) == ()

    def test_removed_handle_reports_no_rate(self) -> None:
        drop = inject(model := pair(), Dropout(0.5), layers="*.0")
        sites = drop.sites
        drop.remove()
        assert len(sites) == 2
        assert drop.p == 0
        assert drop.check() == ["'dropout' was removed from its model."]
        with pytest.raises(InjectionError, match="was removed"):
            drop.metrics()
        assert find(model) == ()

    def test_step_of_all_raises_if_one_injection_follows_an_optimizer(self) -> None:
        model = pair()
        first = inject(model, Dropout(0.5), layers="0.0", schedule=LinearSchedule(10))
        second = inject(model, Dropout(0.5), layers="1.0", schedule=LinearSchedule(10), name="second")
        opt = _sgd(model)
        second.follow(opt)
        with pytest.raises(InjectionError, match="'second' follows an optimizer"):
            find(model).step()
        assert first.step_count == 0
        assert opt is not None

    def test_target_of_0_keeps_the_proportions(self) -> None:
        drop = inject(model := pair(), {"0.0": Dropout(0.05), "1.0": Dropout(0.1)})
        drop.target_p = 0
        drop.target_p = 0.1
        assert [site.p for site in drop.sites] == [0.05, 0.1]
        assert len(find(model)) == 1

    def test_rates_of_each_unit_are_checked_against_their_own_range(self) -> None:
        drop = inject(model := pair(), {"0.0": Dropout(0.1), "1.0": GaussianNoise(2.0)})
        drop.disable()
        drop.enable()
        assert [site.p for site in drop.sites] == pytest.approx([0.1, 2.0])
        assert len(find(model)) == 1


def test_failure_while_placing_removes_the_hooks_already_placed(model: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no more hooks")

    monkeypatch.setattr(model.layer2[1], "register_forward_hook", refuse)
    with pytest.raises(RuntimeError, match="no more hooks"):
        inject(model, Dropout(0.1), layers="layer?.*")
    assert find(model) == ()


def test_warning_as_error_places_no_hook(model: Small) -> None:
    with pytest.raises(HookdropWarning):
        inject(model, Dropout(0.1), layers="layer1.**")
    assert find(model) == ()

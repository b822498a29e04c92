"""State dicts: saving, loading, and errors for states that do not match."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from hookdrop import (
    DropBlock,
    Dropout,
    HookdropWarning,
    LinearSchedule,
    StateError,
    find,
    inject,
)
from tests.support.injections import halve, injected
from tests.support.models import Small, pair


def test_state_dict_contents() -> None:
    _, drop = injected()
    drop.step(3)
    assert drop.state_dict() == {
        "version": 1,
        "name": "dropblock",
        "sites": ["layer1.0", "layer1.1"],
        "step_count": 3,
        "target_p": [0.4, 0.4],
        "declared_p": [0.4, 0.4],
        "enabled": True,
        "schedule": "LinearSchedule(steps=20)",
    }
    assert json.loads(json.dumps(drop.state_dict())) == drop.state_dict()


def test_state_of_a_plain_model_loads_into_a_wrapped_model() -> None:
    plain, wrapped = injected()[1], nn.DataParallel(Small())
    drop = inject(wrapped, DropBlock(0.4, 3), layers="layer1.*", schedule=LinearSchedule(20))
    drop.load_state_dict(plain.state_dict())


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"layers": "layer2.*"}, r"only in the state: 'layer1.0'(.|\n)*only here:         'layer2.0'"),
        ({"layers": ["layer1.*", "fc"], "regularizer": Dropout(0.1)}, r"'dropblock' in the state, 'dropout' here"),
        ({"name": "other"}, r"name: *'dropblock' in the state, 'other' here(.|\n)*strict=False"),
    ],
)
def test_state_of_other_sites_raises_with_the_differences(kwargs: dict[str, object], says: str) -> None:
    _, saved = injected()
    saved.step(5)
    _, drop = injected(**kwargs)
    with pytest.raises(StateError, match=says):
        drop.load_state_dict(saved.state_dict())
    assert drop.step_count == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"version": 2}, "version 2, this hookdrop reads version 1"),
        ({"step_count": -1}, "step_count must be at least 0"),
        ({"step_count": "3"}, "step_count must be an integer"),
        ({"enabled": 1}, "enabled must be a bool, got 1"),
        ({"target_p": [0.4]}, "differ in length"),
        ({"sites": "ab"}, "must be lists"),
        ({"sites": None}, "must be lists"),
        ({"target_p": [0.4, 1.4]}, r"target_p of 'layer1.1': (.|\n)*must lie in \[0, 1\]"),
        ({"target_p": [0.4, None]}, "must be a number"),
    ],
)
def test_invalid_state_raises_and_changes_nothing(change: dict[str, object], says: str) -> None:
    _, drop = injected()
    drop.step(5)
    before = drop.state_dict()
    with pytest.raises(StateError, match=says):
        drop.load_state_dict(before | {"step_count": 9} | change)
    assert drop.state_dict() == before


@pytest.mark.parametrize("thing", [{}, [], None, {"dropblock": {}}])
def test_objects_that_are_not_states_raise(thing: object) -> None:
    _, drop = injected()
    with pytest.raises(StateError, match=r"not the state of an injection(.|\n)*find\(model\).load_state_dict"):
        drop.load_state_dict(thing)


def test_non_strict_load_warns_about_unmatched_sites() -> None:
    _, saved = injected(layers=["layer1.*", "fc"], regularizer=Dropout(0.4))
    saved.target_p = 0.2
    saved.step(5)
    _, drop = injected(layers=["layer1.*", "layer2.0"], regularizer=Dropout(0.4))
    with pytest.warns(
        HookdropWarning, match="1 site here not in the state \\(unchanged\\), 1 site in the state not here"
    ):
        drop.load_state_dict(saved.state_dict(), strict=False)
    assert drop.step_count == 5
    assert [site.p for site in drop.sites] == pytest.approx([0.05, 0.05, 0.1])
    _, other = injected(layers="layer2.*", regularizer=Dropout(0.4))
    with pytest.raises(StateError, match="has none of the sites"):
        other.load_state_dict(drop.state_dict() | {"sites": ["a", "b", "c"]}, strict=False)


def test_loading_keeps_the_schedule_in_code_and_warns() -> None:
    _, saved = injected()
    saved.step(10)
    _, drop = injected(schedule=LinearSchedule(40))
    with pytest.warns(
        HookdropWarning, match=r"in the code, LinearSchedule\(steps=40\); (.|\n)*LinearSchedule\(steps=20\)"
    ):
        drop.load_state_dict(saved.state_dict())
    assert (drop.step_count, drop.p) == (10, 0.1)


def test_loading_uses_the_rate_of_the_state_and_warns() -> None:
    """As an optimizer does with its learning rate, but not silently."""
    _, saved = injected()
    _, drop = injected(regularizer=DropBlock(0.2, 3))
    with pytest.warns(HookdropWarning, match=r"changed from 0.4 to 0.2(.|\n)*drop.target_p = 0.2"):
        drop.load_state_dict(saved.state_dict())
    assert drop.target_p == 0.4


def test_state_dict_of_all_injections_by_name() -> None:
    def both() -> nn.Module:
        model, _ = injected()
        inject(model, Dropout(0.5), layers="fc", schedule=LinearSchedule(10))
        return model

    one, two = both(), both()
    find(one).step(5)
    find(two).load_state_dict(find(one).state_dict())
    assert [drop.p for drop in find(two)] == [0.1, 0.25]
    with pytest.raises(StateError, match=r"only in the states: \[\](.|\n)*only here: *\['dropout'\]"):
        find(two).load_state_dict({"dropblock": find(one)["dropblock"].state_dict()})
    find(two).load_state_dict({"dropblock": find(one)["dropblock"].state_dict()}, strict=False)
    broken = find(one).state_dict() | {"dropout": {}}
    find(one).seek(9)
    broken["dropblock"] = find(one)["dropblock"].state_dict()
    with pytest.raises(StateError):
        find(two).load_state_dict(broken)
    assert [drop.step_count for drop in find(two)] == [5, 5], "a failed load must change nothing"
    with pytest.raises(StateError, match="a mapping of names to states"):
        find(two).load_state_dict([])


def test_sites_in_a_different_order_raise() -> None:
    _, drop = injected()
    saved = drop.state_dict()
    with pytest.raises(StateError, match="the same sites in a different order"):
        drop.load_state_dict(saved | {"sites": saved["sites"][::-1]})


def test_state_dict_without_rates() -> None:
    _, drop = injected(regularizer=halve, schedule=None)
    assert drop.state_dict()["target_p"] == [None, None]
    drop.step(3)
    _, again = injected(regularizer=halve, schedule=None)
    again.load_state_dict(drop.state_dict())
    assert again.step_count == 3


def test_loading_rates_out_of_range_changes_nothing() -> None:
    drop = inject(model := pair(), Dropout(0.3), layers="*.0", p_scale={"0.0": 2.0})
    before = drop.state_dict()
    with pytest.raises(StateError, match="must lie in"):
        drop.load_state_dict(before | {"target_p": [0.9, 0.9], "step_count": 77, "enabled": False})
    assert drop.state_dict() == before
    assert len(find(model)) == 1


def test_loading_rates_for_sites_without_a_rate_raises() -> None:
    drop = inject(model := pair(), torch.relu, layers="*.0")
    saved = drop.state_dict() | {"target_p": [0.1, 0.1]}
    with pytest.raises(StateError, match="which has none. Nothing was loaded"):
        drop.load_state_dict(saved)
    assert len(find(model)) == 1

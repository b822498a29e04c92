"""Saving, resuming, configs."""

from __future__ import annotations

import json

import pytest
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
from tests.support.nets import Small
from tests.support.state import halve, injected


def test_the_state_is_plain_and_small() -> None:
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


def test_a_state_under_wrappers_has_the_same_names() -> None:
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
def test_a_state_of_other_sites_lists_the_differences_and_changes_nothing(kwargs: dict[str, object], says: str) -> None:
    _, saved = injected()
    saved.step(5)
    _, drop = injected(**kwargs)
    with pytest.raises(StateError, match=says):
        drop.load_state_dict(saved.state_dict())
    assert drop.step_count == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"version": 2}, "version 2, this hookdrop reads 1"),
        ({"step_count": -1}, "step_count must be at least 0"),
        ({"step_count": "3"}, "step_count must be an integer"),
        ({"enabled": 1}, "enabled is 1, not a bool"),
        ({"target_p": [0.4]}, "differ in length"),
        ({"sites": "ab"}, "are not lists"),
        ({"sites": None}, "are not lists"),
        ({"target_p": [0.4, 1.4]}, r"target_p of 'layer1.1': (.|\n)*must lie in \[0, 1\]"),
        ({"target_p": [0.4, None]}, "must be a number"),
    ],
)
def test_a_damaged_state_changes_nothing(change: dict[str, object], says: str) -> None:
    _, drop = injected()
    drop.step(5)
    before = drop.state_dict()
    with pytest.raises(StateError, match=says):
        drop.load_state_dict(before | {"step_count": 9} | change)
    assert drop.state_dict() == before


@pytest.mark.parametrize("thing", [{}, [], None, {"dropblock": {}}])
def test_something_else_than_a_state(thing: object) -> None:
    _, drop = injected()
    with pytest.raises(StateError, match=r"not the state of an injection(.|\n)*find\(model\).load_state_dict"):
        drop.load_state_dict(thing)


def test_not_strict_loads_what_fits_and_says_what_does_not() -> None:
    _, saved = injected(layers=["layer1.*", "fc"], regularizer=Dropout(0.4))
    saved.target_p = 0.2
    saved.step(5)
    _, drop = injected(layers=["layer1.*", "layer2.0"], regularizer=Dropout(0.4))
    with pytest.warns(HookdropWarning, match="no partner for 1 site here and 1 of the state"):
        drop.load_state_dict(saved.state_dict(), strict=False)
    assert drop.step_count == 5
    assert [site.p for site in drop.sites] == pytest.approx([0.05, 0.05, 0.1])
    _, other = injected(layers="layer2.*", regularizer=Dropout(0.4))
    with pytest.raises(StateError, match="has none of the sites"):
        other.load_state_dict(drop.state_dict() | {"sites": ["a", "b", "c"]}, strict=False)


def test_another_schedule_in_code_wins_with_a_warning() -> None:
    _, saved = injected()
    saved.step(10)
    _, drop = injected(schedule=LinearSchedule(40))
    with pytest.warns(HookdropWarning, match=r"LinearSchedule\(steps=40\) is used; (.|\n)*LinearSchedule\(steps=20\)"):
        drop.load_state_dict(saved.state_dict())
    assert (drop.step_count, drop.p) == (10, 0.1)


def test_another_p_in_code_is_told() -> None:
    """The state's rate goes on, as an optimizer's learning rate does; not silently."""
    _, saved = injected()
    _, drop = injected(regularizer=DropBlock(0.2, 3))
    with pytest.warns(HookdropWarning, match=r"the code says 0.2 now(.|\n)*drop.target_p = 0.2"):
        drop.load_state_dict(saved.state_dict())
    assert drop.target_p == 0.4


def test_many_injections_are_saved_by_name() -> None:
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
    assert [drop.step_count for drop in find(two)] == [5, 5], "a failed load must leave all as it was"
    with pytest.raises(StateError, match="a state for each name"):
        find(two).load_state_dict([])


def test_sites_in_another_order_are_another_list() -> None:
    _, drop = injected()
    saved = drop.state_dict()
    with pytest.raises(StateError, match="the same sites in another order"):
        drop.load_state_dict(saved | {"sites": saved["sites"][::-1]})


def test_a_state_without_rates() -> None:
    _, drop = injected(regularizer=halve, schedule=None)
    assert drop.state_dict()["target_p"] == [None, None]
    drop.step(3)
    _, again = injected(regularizer=halve, schedule=None)
    again.load_state_dict(drop.state_dict())
    assert again.step_count == 3

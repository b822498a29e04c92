"""State dicts: saving, loading, and errors for states that do not match."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from hookdrop import DropBlock, Dropout, HookdropWarning, LinearSchedule, StateError, find, inject
from tests.support.injections import halve, injected
from tests.support.models import Small, pair


def changed(saved: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return a state with other values in each injection."""
    injections = {name: one | changes for name, one in saved["injections"].items()}
    return saved | {"injections": injections}


def test_state_dict_contents() -> None:
    _, drop = injected()
    drop.step(3)
    drop.target_p = 0.2
    wrapped = inject(nn.DataParallel(Small()), DropBlock(0.4, 3), layers="layer1.*", schedule=LinearSchedule(20))
    spec = {
        "regularizer": "DropBlock(p=0.4, block_size=3)",
        "layers": ["layer1.0", "layer1.1"],
        "schedule": "LinearSchedule(steps=20)",
        "name": "dropblock",
    }
    saved = {
        "step_count": 3,
        "enabled": True,
        "sites": ["layer1.0", "layer1.1"],
        "target_p": [0.2, 0.2],
        "start": [0.0, 0.0],
    }
    assert drop.state_dict() == {"version": 2, "injections": {"dropblock": saved | {"spec": json.dumps(spec)}}}
    wrapped.load_state_dict(json.loads(json.dumps(drop.state_dict())))
    assert wrapped.state_dict() == drop.state_dict()


INVALID: dict[str, list[object]] = {
    "step_count": [-1, "3"], "enabled": [1], "target_p": [[0.4], [0.4, 1.4], [0.4, None], None], "spec": [None, "{", "[]"],
    "start": [[0.0]],
}  # fmt: skip


@pytest.mark.parametrize("key", INVALID)
def test_invalid_state_raises_and_changes_nothing(key: str) -> None:
    _, drop = injected()
    drop.step(5)
    before = drop.state_dict()
    for value in INVALID[key]:
        with pytest.raises(StateError):
            drop.load_state_dict(changed(before, **{"step_count": 9} | {key: value}))
        assert drop.state_dict() == before


def test_objects_that_are_not_states_raise() -> None:
    _, drop = injected()
    for thing in ({}, [], None, {"dropblock": {}}, {"version": 1, "injections": {}}):
        with pytest.raises(StateError):
            drop.load_state_dict(thing)  # type: ignore[arg-type]


def test_non_strict_load_warns_about_unmatched_sites() -> None:
    _, saved = injected(layers=["layer1.*", "fc"], regularizer=Dropout(0.4))
    saved.target_p = 0.2
    saved.step(5)
    _, drop = injected(layers=["layer1.*", "layer2.0"], regularizer=Dropout(0.4))
    with pytest.warns(HookdropWarning, match="1 site only here"):
        drop.load_state_dict(saved.state_dict(), strict=False)
    assert drop.step_count == 5
    assert [site.p for site in drop.sites] == pytest.approx([0.05, 0.05, 0.1])
    _, other = injected(layers="fc", regularizer=Dropout(0.4))
    with pytest.raises(StateError):
        other.load_state_dict(drop.state_dict(), strict=False)


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"schedule": LinearSchedule(40)}, "schedule: "),
        ({"regularizer": DropBlock(0.2, 5)}, "p=0.2, block_size=5"),
        ({"p_scale": {"layer1.0": 0.5}}, "p_scale: "),
    ],
)
def test_loading_keeps_the_settings_of_the_code_and_warns(kwargs: dict[str, object], says: str) -> None:
    _, saved = injected()
    saved.step(10)
    _, drop = injected(**kwargs)
    with pytest.warns(HookdropWarning, match=says):
        drop.load_state_dict(saved.state_dict())
    assert (drop.step_count, drop.target_p) == (10, 0.4)


def test_state_dict_of_all_injections_by_name() -> None:
    def both() -> nn.Module:
        model, _ = injected()
        inject(model, Dropout(0.5), layers="fc", schedule=LinearSchedule(10))
        return model

    one, two = both(), both()
    find(one).step(5)
    find(two).load_state_dict(find(one).state_dict())
    assert [drop.p for drop in find(two)] == [0.1, 0.25]
    part = find(one)["dropblock"].state_dict()
    with pytest.raises(StateError):
        find(two).load_state_dict(part)
    find(two).load_state_dict(part, strict=False)
    broken = find(one).state_dict()
    broken["injections"]["dropout"] = {}
    broken["injections"]["dropblock"]["step_count"] = 9
    with pytest.raises(StateError):
        find(two).load_state_dict(broken)
    assert [drop.step_count for drop in find(two)] == [5, 5], "a failed load must change nothing"


def test_sites_in_a_different_order_are_matched_by_name() -> None:
    _, drop = injected()
    drop.load_state_dict(changed(drop.state_dict(), sites=["layer1.1", "layer1.0"], target_p=[0.3, 0.4]))
    assert {sink.site: sink.target for sink in drop._sinks} == {"layer1.0": 0.4, "layer1.1": 0.3}


def test_state_dict_without_rates() -> None:
    """A function and a lambda have no text form, but their state can be saved."""
    _, drop = injected(regularizer=halve, schedule=None)
    assert drop.state_dict()["injections"]["halve"]["target_p"] == [None, None]
    drop.step(3)
    _, again = injected(regularizer=halve, schedule=None)
    again.load_state_dict(drop.state_dict())
    assert again.step_count == 3


@pytest.mark.parametrize(
    ("regularizer", "settings", "target"), [(torch.relu, {}, 0.1), (Dropout(0.3), {"p_scale": {"0.0": 2.0}}, 0.9)]
)
def test_loading_rates_that_do_not_fit_changes_nothing(regularizer: Any, settings: Any, target: float) -> None:
    """The first has no rate, and the second is out of range after p_scale."""
    model = pair()
    drop = inject(model, regularizer, layers="*.0", **settings)
    before = drop.state_dict()
    with pytest.raises(StateError):
        drop.load_state_dict(changed(before, target_p=[target, target], step_count=77, enabled=False))
    assert drop.state_dict() == before

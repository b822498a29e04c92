"""`inject`: argument order, string regularizers, and repeated calls."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from hookdrop import DropBlock, Dropout, HookdropWarning, InjectionError, LinearSchedule, find, inject
from tests.support.models import Small


def test_string_regularizers_in_a_mapping(model: Small) -> None:
    drop = inject(model, {"layer1.*": "Dropout2d(p=0.1)", nn.Linear: "Dropout(p=0.5)"}, schedule=LinearSchedule(2))
    assert drop.name == "dropout2d_dropout"
    drop.step(2)
    assert [site.p for site in drop.sites] == [0.1, 0.1, 0.5]


def test_injecting_twice_raises_unless_on_existing_is_set(model: Small) -> None:
    def cell(**kwargs: Any) -> Any:
        return inject(model, DropBlock(0.1, 3), layers="layer?.*", **kwargs)

    cell()
    for settings in ({}, {"on_existing": "stack"}):
        with pytest.raises(InjectionError):
            cell(**settings)
    cell(on_existing="replace")
    assert len(find(model)) == 1
    cell(on_existing="stack", name="second")
    assert [drop.name for drop in find(model)] == ["dropblock", "second"]


def test_failure_while_placing_removes_the_hooks_already_placed(model: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no more hooks")

    monkeypatch.setattr(model.layer2[1], "register_forward_hook", refuse)
    with pytest.raises(RuntimeError, match="no more hooks"):
        inject(model, Dropout(0.1), layers="layer?.*")
    assert not find(model)


def test_warning_as_error_places_no_hook(model: Small) -> None:
    with pytest.raises(HookdropWarning):
        inject(model, Dropout(0.1), layers="layer1.**")
    assert not find(model)

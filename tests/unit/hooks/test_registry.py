"""Find, remove and hide hooks on submodules and after model surgery."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hookdrop import (
    Dropout,
    InjectionError,
    LinearSchedule,
    eject,
    find,
    inject,
    without_hooks,
)
from tests.support.identity import zeroed
from tests.support.pairs import ROWS, pair


class TestSubmodules:
    def test_eject_a_submodule_then_remove_the_rest(self) -> None:
        model = pair()
        drop = inject(model, Dropout(0.5), layers="*.0")
        model(ROWS)
        assert eject(model[0]) == 1
        assert zeroed(model[0][0], ROWS) == 0
        assert zeroed(model[1][0], ROWS) == pytest.approx(0.5, abs=0.05)
        drop.remove()
        assert zeroed(model[1][0], ROWS) == 0
        assert find(model) == ()

    def test_seek_through_a_submodule_affects_every_site(self) -> None:
        model = pair()
        drop = inject(model, Dropout(0.5), layers="*.0", schedule=LinearSchedule(10))
        find(model[0]).seek(10)
        assert [site.p for site in drop.sites] == [0.5, 0.5]

    def test_injections_with_equal_names_on_submodules_are_distinguished(self) -> None:
        model = pair()
        inject(model[0], Dropout(0.5), layers="0")
        inject(model[1], Dropout(0.2), layers="0")
        with pytest.raises(InjectionError, match=r"2 injections here are named 'dropout'"):
            find(model).state_dict()
        assert [drop.p for drop in find(model)] == [0.5, 0.2]
        assert eject(model) == 2

    def test_inject_inside_without_hooks_is_an_error(self) -> None:
        model = pair()
        inject(model, Dropout(0.5), layers="*.0")
        with without_hooks(model), pytest.raises(InjectionError, match="inside without_hooks"):
            inject(model, Dropout(0.5), layers="*.0")
        assert len(find(model)) == 1


class TestSurgery:
    """Quantization and fusion re-register the hooks of a module on its replacement."""

    @pytest.mark.parametrize("at", ["output", "input"])
    def test_reregistered_hooks_can_be_removed(self, at: str) -> None:
        model = pair().eval()
        drop = inject(model, Dropout(0.5), layers="*.0", at=at)
        replacement = nn.Linear(8, 8).eval()
        for hook in model[0][0]._forward_hooks.values():
            replacement.register_forward_hook(hook)
        for hook in model[0][0]._forward_pre_hooks.values():
            replacement.register_forward_pre_hook(hook)
        model[0][0] = replacement
        clean = replacement(ROWS)
        with without_hooks(model):
            assert not replacement._forward_hooks
            assert not replacement._forward_pre_hooks
        replacement.train()
        model[1].train()(model[0](ROWS))
        assert not torch.equal(replacement(ROWS), clean)
        drop.remove()
        assert torch.equal(replacement(ROWS), clean)
        assert not replacement._forward_hooks
        assert not replacement._forward_pre_hooks

"""What an adversary would try: parts of models, surgery, contexts out of order, failures half-way."""

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
from tests.support.pairs import ROWS, pair


def zeroed(module: nn.Module) -> float:
    with torch.no_grad():
        return (module(ROWS) == 0).float().mean().item()


class TestParts:
    def test_a_part_is_given_back_alone_and_the_rest_later(self) -> None:
        model = pair()
        drop = inject(model, Dropout(0.5), layers="*.0")
        model(ROWS)
        assert eject(model[0]) == 1
        assert zeroed(model[0][0]) == 0
        assert zeroed(model[1][0]) == pytest.approx(0.5, abs=0.05)
        drop.remove()
        assert zeroed(model[1][0]) == 0
        assert find(model) == ()

    def test_a_step_through_a_part_moves_every_site(self) -> None:
        model = pair()
        drop = inject(model, Dropout(0.5), layers="*.0", schedule=LinearSchedule(10))
        find(model[0]).seek(10)
        assert [site.p for site in drop.sites] == [0.5, 0.5]

    def test_two_injections_of_one_name_on_parts_are_told_apart(self) -> None:
        model = pair()
        inject(model[0], Dropout(0.5), layers="0")
        inject(model[1], Dropout(0.2), layers="0")
        with pytest.raises(InjectionError, match=r"2 injections here are named 'dropout'"):
            find(model).state_dict()
        assert [drop.p for drop in find(model)] == [0.5, 0.2]
        assert eject(model) == 2

    def test_injecting_inside_without_hooks_is_refused(self) -> None:
        model = pair()
        inject(model, Dropout(0.5), layers="*.0")
        with without_hooks(model), pytest.raises(InjectionError, match="inside without_hooks"):
            inject(model, Dropout(0.5), layers="*.0")
        assert len(find(model)) == 1


class TestSurgery:
    """Quantization and fusion register a module's hooks anew on its successor."""

    @pytest.mark.parametrize("at", ["output", "input"])
    def test_hooks_that_were_registered_anew_can_be_removed(self, at: str) -> None:
        model = pair().eval()
        drop = inject(model, Dropout(0.5), layers="*.0", at=at)
        successor = nn.Linear(8, 8).eval()
        for hook in model[0][0]._forward_hooks.values():
            successor.register_forward_hook(hook)
        for hook in model[0][0]._forward_pre_hooks.values():
            successor.register_forward_pre_hook(hook)
        model[0][0] = successor
        clean = successor(ROWS)
        with without_hooks(model):
            assert not successor._forward_hooks
            assert not successor._forward_pre_hooks
        successor.train()
        model[1].train()(model[0](ROWS))
        assert not torch.equal(successor(ROWS), clean)
        drop.remove()
        assert torch.equal(successor(ROWS), clean)
        assert not successor._forward_hooks
        assert not successor._forward_pre_hooks

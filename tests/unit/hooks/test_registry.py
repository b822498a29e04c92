"""Find, remove and hide hooks on submodules and after model surgery."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hookdrop import Dropout, GaussianDropout, InjectionError, find, inject, without_hooks
from tests.support.models import ROWS, pair


def test_injections_with_equal_names_on_submodules_are_distinguished() -> None:
    model = pair()
    inject(model[0], Dropout(0.5), layers="0")
    inject(model[1], Dropout(0.2), layers="0")
    with pytest.raises(InjectionError):
        find(model).state_dict()
    assert (len(find(model)), find(model).p, find(model[1]).p) == (1, 0.5, 0.2)
    find(model).remove()


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


def test_order_of_user_hooks_is_kept(model: nn.Module, images: torch.Tensor) -> None:
    order: list[str] = []
    model.fc.register_forward_hook(lambda *_: order.append("first"))
    drop = inject(model, Dropout(0.5), layers="fc")
    model.fc.register_forward_hook(lambda *_: order.append("second"))
    before = [type(hook).__name__ for hook in model.fc._forward_hooks.values()]
    with without_hooks(model):
        assert len(model.fc._forward_hooks) == 2
        model.fc.register_forward_hook(lambda *_: order.append("inside"))
    assert [type(hook).__name__ for hook in model.fc._forward_hooks.values()][:3] == before
    model(images)
    assert order == ["first", "second", "inside"]
    drop.remove()
    assert len(model.fc._forward_hooks) == 3


def test_without_hooks_keeps_ids_and_respects_removal_inside(model: nn.Module) -> None:
    first = inject(model, Dropout(0.5), layers="fc")
    second = inject(model, GaussianDropout(0.5), layers="fc", on_existing="stack", at="input")
    ids = list(model.fc._forward_hooks), list(model.fc._forward_pre_hooks)
    with without_hooks(model):
        assert not model.fc._forward_hooks
        assert not model.fc._forward_pre_hooks_with_kwargs
        assert not find(model)
        first.remove()
    assert not model.fc._forward_hooks
    assert list(model.fc._forward_pre_hooks) == ids[1]
    assert find(model) == second

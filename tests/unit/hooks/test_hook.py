"""A hooked layer: mode, output in eval mode, errors. Hooks are found, removed and hidden, also after model surgery."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookdrop import (
    Dropout,
    DropPath,
    GaussianDropout,
    InjectionError,
    LayerDrop,
    NEFTune,
    ShapeError,
    find,
    inject,
    without_hooks,
)
from hookdrop.hooks.branch_hooks import SkipHook
from hookdrop.recipes.base import Recipe, RecipeSite
from tests.support.models import ROWS, Small, pair, toy


def test_eval_returns_the_layers_own_output_object() -> None:
    keeps = toy(lambda m, x: setattr(m, "out", x * 2) or m.out)
    inject(model := nn.Sequential(keeps), Dropout(0.5), layers="0")
    assert model.eval()(torch.ones(3)) is keeps.out
    assert model.train()(torch.ones(3)) is not keeps.out


def returns_none(x: torch.Tensor) -> None:
    """A function whose `return` is missing."""


def test_functions_that_do_not_return_a_tensor_of_the_shape_are_errors(model: Small, images: torch.Tensor) -> None:
    for wrong in (returns_none, torch.Tensor.sum):
        with inject(model, wrong, layers="fc"), pytest.raises(ShapeError, match="at 'fc' got .* and returned"):
            model(images)


def test_error_inside_a_regularizer_names_the_site(model: Small, images: torch.Tensor) -> None:
    inject(model, torch.linalg.inv, layers="fc")
    with pytest.raises(RuntimeError) as error:
        model(images)
    assert error.value.__notes__ == ["in hookdrop's linalg_inv at 'fc'"]


SIZE = 23  # no other tensor has this size


def failing(m: Any, x: Tensor) -> Tensor:
    x = m.fc(x)
    if m.fails:
        raise FloatingPointError
    return x


def net() -> Any:
    branch = toy(failing, fc=nn.Linear(8, 8), fails=False)
    block = toy(lambda m, x, attention_mask=None: x + m.branch(x), branch=branch)
    return toy(lambda m, x, attention_mask=None: m.block(x, attention_mask=attention_mask), block=block)


class Skip(Recipe):
    def sites(self, model: nn.Module, survey: Any) -> list[RecipeSite]:
        return [RecipeSite("block", Dropout(0.5), at="skip", branch="branch")]


PLACED = {
    "identity skip": (Skip(), {}),
    "subset": (DropPath(0.5, mode="subset"), {"layers": "block.branch"}),
    "samples": (DropPath(0.5, samples=("", 0, False)), {"layers": "block.branch.fc"}),
    "layer input": (LayerDrop(0.5), {"layers": "block"}),
    "attention mask": (NEFTune(5.0, attention_mask=True), {"layers": "block.branch.fc"}),
}


@pytest.mark.parametrize("kind", PLACED)
def test_nothing_holds_activations(kind: str) -> None:
    regularizer, settings = PLACED[kind]
    model = net()
    drop = inject(model, regularizer, **settings)
    assert kind != "identity skip" or isinstance(drop._sinks[0], SkipHook)
    model.block.branch.fails = True
    gc.collect()
    for _ in range(2):
        with pytest.raises(FloatingPointError):
            model(torch.ones(4, SIZE, 8), attention_mask=torch.ones(4, SIZE))
    gc.collect()
    alive = [one for one in gc.get_objects() if issubclass(type(one), Tensor)]
    assert not [one.shape for one in alive if SIZE in one.shape]


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

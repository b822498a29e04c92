"""A hooked layer: its mode, its output in eval mode, repeated calls and errors."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookdrop import DropBlock, Dropout, DropPath, LayerDrop, NEFTune, ShapeError, inject
from hookdrop.hooks.branch_hooks import SkipHook
from hookdrop.recipes.base import Recipe, RecipeSite
from tests.support.models import Small, toy


def test_eval_returns_the_layers_own_output_object() -> None:
    keeps = toy(lambda m, x: setattr(m, "out", x * 2) or m.out)
    inject(model := nn.Sequential(keeps), Dropout(0.5), layers="0")
    assert model.eval()(torch.ones(3)) is keeps.out
    assert model.train()(torch.ones(3)) is not keeps.out


def test_the_mode_of_the_hooked_layer_applies(model: nn.Module, images: torch.Tensor) -> None:
    """A submodule that its owner keeps in eval mode (frozen batch norm) is not regularized."""
    drop = inject(model, DropBlock(0.5, 3), layers="layer1.*.bn1")
    model.train()
    model.layer1[0].eval()
    with drop.recording(last=0) as m:
        model(images)
    assert m.totals.sites["layer1.0.bn1"].calls == 0
    assert m.totals.sites["layer1.1.bn1"].calls == 1


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


ROWS = 23  # no other tensor has this size


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
            model(torch.ones(4, ROWS, 8), attention_mask=torch.ones(4, ROWS))
    gc.collect()
    alive = [one for one in gc.get_objects() if issubclass(type(one), Tensor)]
    assert not [one.shape for one in alive if ROWS in one.shape]

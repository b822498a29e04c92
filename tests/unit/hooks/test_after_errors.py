"""After an exception in a hooked layer or branch, no hook holds a tensor of the forward."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookdrop import Dropout, DropPath, LayerDrop, NEFTune, inject
from hookdrop.hooks.branch_hooks import SkipHook
from hookdrop.recipes.base import Recipe, RecipeSite
from tests.support.models import toy

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

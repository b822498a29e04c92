"""A hooked layer: its mode, its output in eval mode, repeated calls and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hookdrop import DropBlock, Dropout, Regularizer, ShapeError, inject
from tests.support.models import Small


def test_eval_returns_the_layers_own_output_object() -> None:
    class Keeps(nn.Identity):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.out = x * 2
            return self.out

    model = nn.Sequential(Keeps())
    inject(model, Dropout(0.5), layers="0")
    model.eval()
    assert model(torch.ones(3)) is model[0].out
    model.train()
    assert model(torch.ones(3)) is not model[0].out


def test_the_mode_of_the_hooked_layer_applies(model: nn.Module, images: torch.Tensor) -> None:
    """A submodule that its owner keeps in eval mode (frozen batch norm) is not regularized."""
    drop = inject(model, DropBlock(0.5, 3), layers="layer1.*.bn1")
    model.train()
    model.layer1[0].eval()
    with drop.recording(last=0) as m:
        model(images)
    assert m.totals.sites["layer1.0.bn1"].calls == 0
    assert m.totals.sites["layer1.1.bn1"].calls == 1


def test_modules_called_several_times_draw_a_mask_each_time() -> None:
    relu = nn.ReLU()
    model = nn.Sequential(relu, nn.Identity(), relu)
    drop = inject(model, Dropout(0.5), layers="0")
    with drop.recording(last=0) as m:
        out = model(torch.ones(10_000))
    assert m.totals.sites["0"].calls == 2
    assert (out == 0).float().mean() == pytest.approx(0.75, abs=0.03)


class ReturnsNone(Regularizer):
    """A regularizer whose `return` is missing."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = p

    def regularize(self, x: torch.Tensor, rate: Any) -> torch.Tensor:  # type: ignore[return]
        x * 0


def test_custom_regularizer_that_returns_none_is_an_error(model: Small, images: torch.Tensor) -> None:
    inject(model, ReturnsNone(), layers="fc")
    with pytest.raises(ShapeError, match="ReturnsNone at 'fc' got .* and returned NoneType"):
        model(images)


def test_error_inside_a_regularizer_names_the_site(model: Small, images: torch.Tensor) -> None:
    inject(model, torch.linalg.inv, layers="fc")
    with pytest.raises(RuntimeError) as error:
        model(images)
    assert error.value.__notes__ == ["in hookdrop's linalg_inv at 'fc'"]

"""What a plan warns about, besides shapes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hookdrop import DropBlock, Dropout, DropPath, Regularizer, plan
from tests.support.models import Small, toy


@pytest.mark.parametrize("regularizer", [DropBlock(0.95, 3), DropPath(0.8)])
def test_rates_that_look_like_keep_prob_warn(regularizer: Regularizer) -> None:
    (warning,) = plan(nn.Sequential(nn.Identity()), regularizer, layers="0").warnings
    assert f"did you mean keep_prob={regularizer.p:g}?" in warning


@pytest.mark.parametrize("regularizer", [DropPath(0.79), DropPath(0.96), Dropout(0.9), DropPath(keep_prob=0.9)])
def test_other_rates_do_not_warn(regularizer: Regularizer) -> None:
    assert plan(nn.Sequential(nn.Identity()), regularizer, layers="0").warnings == []


def skips() -> nn.Module:
    """Drops whole samples, in training mode."""
    return toy(lambda m, x: x * (torch.rand(len(x), 1) > m.chance) if m.training else x, chance=0.1)


@pytest.mark.parametrize("drops", [nn.Dropout(0.1), skips(), DropPath(0.1)])
@pytest.mark.parametrize("place", ["0", "1", "2"], ids=["layer", "gain", "itself"])
def test_layers_that_already_drop_warn(drops: nn.Module, place: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), toy(lambda m, x: x * torch.ones(4)), drops, nn.Linear(4, 4))
    (warning,) = plan(model, Dropout(0.1), layers=place, example_input=torch.ones(2, 4)).warnings
    assert f"Dropout at '{place}': '2' already drops there" in warning
    assert not plan(model, Dropout(0.1), layers="3", example_input=torch.ones(2, 4)).warnings


@pytest.mark.parametrize("drops", [nn.Dropout(0.0), nn.Identity(), nn.ReLU(), nn.Sequential()])
def test_layers_that_drop_nothing_do_not_warn(drops: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(4, 4), drops)
    assert not plan(model, Dropout(0.1), layers="*", example_input=torch.ones(2, 4)).warnings


def test_drop_path_on_whole_blocks_warns(model: Small, images: torch.Tensor) -> None:
    drafted = plan(model, DropPath(0.1), layers="layer1.*", example_input=images)
    (warning,) = [text for text in drafted.warnings if "whole residual block" in text]
    assert warning.startswith("DropPath at 'layer1.0': the output includes the input")
    assert warning.endswith("such as attn, mlp or bn3. (and 1 more site like it)")

"""`check_recipe`: every recipe in a small model, and wrong recipes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import nn

from hookdrop import recipes
from hookdrop.testing import check_recipe
from tests.integration.models.test_dropblock_unet import UNet
from tests.support.models import randomize_norms
from tests.support.transformers_models import IDS, llama


def vit(**settings: Any) -> nn.Module:
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 4}
    return timm.create_model("vit_tiny_patch16_224", **sizes, **settings)


def resnet() -> nn.Module:
    return timm.create_model("resnet10t", num_classes=4, channels=(8, 8, 16, 16), stem_width=8)


IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
CASES: dict[str, tuple[Any, Callable[[], nn.Module], Any]] = {
    "stochastic_depth": (recipes.stochastic_depth(p=0.5), resnet, IMAGES),
    "stochastic_depth (subset)": (recipes.stochastic_depth(p=0.5, mode="subset"), vit, IMAGES),
    "dropblock_resnet": (recipes.dropblock_resnet(p=0.3, block_size=3), resnet, IMAGES.repeat(1, 1, 2, 2)),
    "timm_dropblock": (recipes.timm_dropblock(p=0.3), resnet, IMAGES.repeat(1, 1, 2, 2)),
    "dropblock_unet": (recipes.dropblock_unet(p=0.3, block_size=3), UNet, IMAGES),
    "layer_drop": (recipes.layer_drop(p=0.5), llama, IDS),
    "residual_dropout": (recipes.residual_dropout(p=0.3), llama, {"input_ids": IDS}),
    "head_dropout": (recipes.head_dropout(p=0.4), vit, IMAGES),
    "drop_key": (recipes.drop_key(p=0.4), vit, IMAGES),
    "drop_key (causal)": (recipes.drop_key(p=0.4), llama, IDS),
    "patch_dropout": (recipes.patch_dropout(p=0.5), vit, IMAGES),
    "neftune": (recipes.neftune(), llama, IDS),
    "set_dropout": (recipes.set_dropout(p=0.3), lambda: vit(drop_rate=0.1), IMAGES),
}


@pytest.mark.parametrize("name", CASES)
def test_hookdrops_recipes_pass(name: str) -> None:
    recipe, make, example = CASES[name]
    torch.manual_seed(0)
    check_recipe(recipe, randomize_norms(make()), example)

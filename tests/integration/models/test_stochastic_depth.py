"""Stochastic depth, validated against the libraries' own, or at rate 1 where they have none; every recipe in a small model."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import timm
import torch
from timm.layers import DropPath as TimmDropPath
from torch import Tensor, nn
from torchvision.models.convnext import CNBlockConfig, ConvNeXt
from torchvision.models.swin_transformer import SwinTransformer
from torchvision.ops import StochasticDepth

from hookdrop import inject, plan, recipes
from hookdrop.recipes import stochastic_depth
from hookdrop.testing import check_recipe
from tests.integration.models.test_dropblock import UNet
from tests.support.models import randomize_norms
from tests.support.tensors import all_equal
from tests.support.training import train_step
from tests.support.transformers_models import IDS, llama

P = 0.3


def float32_scale(name: str, index: int, count: int) -> float:
    """Scale of timm's transformers, whose rates are a float32 `linspace`."""
    return torch.linspace(0, P, count)[index].item() / P


def efficientnet_scale(name: str, index: int, count: int) -> float:
    """Scale of EfficientNets, which never reaches 1."""
    return index / count


TIMM: dict[str, tuple[dict[str, Any], Any]] = {
    "resnet26": ({"channels": (8, 8, 16, 16), "stem_width": 8}, "depth_from_zero"),
    "convnext_atto": ({"dims": (8, 8, 16, 16)}, float32_scale),
    "vit_tiny_patch16_224": ({"img_size": 64, "depth": 4, "embed_dim": 24}, float32_scale),
    "swin_tiny_patch4_window7_224": ({"img_size": 56, "depths": (1, 1, 2, 1), "embed_dim": 24}, float32_scale),
    "efficientnet_lite0": ({}, efficientnet_scale),
}


def tiny_swin(p: float) -> nn.Module:
    return SwinTransformer([4, 4], 12, [2, 2], [2, 2], [7, 7], stochastic_depth_prob=p, num_classes=5)


def tiny_convnext(p: float) -> nn.Module:
    return ConvNeXt([CNBlockConfig(8, 16, 2), CNBlockConfig(16, None, 2)], stochastic_depth_prob=p, num_classes=5)


def assert_same_training_step(native: nn.Module, clean: nn.Module, x: Tensor, own: Any, p_scale: Any) -> None:
    """A model that was built with stochastic depth, and one where the recipe places the library's own module."""
    randomize_norms(native)
    clean.load_state_dict(native.state_dict())
    without = train_step(clean, x)[0]
    clean.load_state_dict(native.state_dict())
    sites = plan(clean, stochastic_depth(P), p_scale=p_scale, example_input=x).sites
    inject(clean, {site.name: own(site.p) for site in sites})
    ours = train_step(clean, x)
    assert all_equal(ours, train_step(native, x))
    assert not torch.equal(ours[0], without)


@pytest.mark.parametrize("name", TIMM)
def test_outputs_and_gradients_match_timms_drop_path_rate(name: str) -> None:
    settings, p_scale = TIMM[name]
    native, clean = (timm.create_model(name, drop_path_rate=p, num_classes=5, **settings) for p in (P, 0.0))
    size = settings.get("img_size", 64)
    assert_same_training_step(native, clean, torch.randn(4, 3, size, size), TimmDropPath, p_scale)


@pytest.mark.parametrize("make", [tiny_convnext, tiny_swin])
def test_outputs_and_gradients_match_torchvisions_stochastic_depth_prob(make: Callable[[float], nn.Module]) -> None:
    own = partial(StochasticDepth, mode="row")
    assert_same_training_step(make(P), make(0.0), torch.randn(4, 3, 56, 56), own, "depth_from_zero")


STATUSES: dict[str, dict[str, str]] = {
    "stochastic_depth": dict.fromkeys(["bert", "falcon_h1", "gptj", "levit", "t5", "wav2vec2"], "passed")
    | {"glm4v_vision": "batch"}
    | dict.fromkeys(["gemma3n_text", "deepseek_v4"], "refused"),  # layers with several streams
    "head_dropout": dict.fromkeys(["bart", "fsmt", "llama"], "passed")
    | {"diffllama": "differs"},  # two maps of attention are one head, and the config counts both
    "layer_drop": dict.fromkeys(["conditional_detr", "levit", "t5"], "passed"),
    "neftune": {"t5": "passed"},
    "patch_dropout": dict.fromkeys(["deit", "idefics3_vision"], "passed")
    | dict.fromkeys(["pvt", "siglip2_vision_model", "timesformer", "vilt", "yolos"], "refused"),
}
"""One family for each structure; `benchmarks/transformers_zoo.py` checks all families in the same way."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("recipe", "name"), [(recipe, name) for recipe, names in STATUSES.items() for name in names])
def test_families_that_are_easily_misread(recipe: str, name: str) -> None:
    """For `stochastic_depth`, every branch of every layer has a site at its end."""
    pytest.importorskip("transformers")
    from families import tiny
    from families.layers import find_runs
    from families.recipes import CASES, run_case

    found = ((model, *find_runs(model)) for model in tiny.models(name))
    model, runs = next((model, runs) for model, runs, missing, _ in found if not missing)
    record = run_case(CASES[recipe], model, runs)
    assert record["status"] == STATUSES[recipe][name], record
    assert record["status"] == "refused" or record["sites"]


@pytest.mark.parametrize(("p_scale", "first", "last"), [(None, 0.0, 0.8), ("depth", 0.1, 0.8), ("equal", 0.8, 0.8)])
def test_rates_grow_from_zero_to_p_by_default(p_scale: Any, first: float, last: float) -> None:
    found = [site.p for site in plan(timm.create_model("resnet18"), stochastic_depth(0.8), p_scale=p_scale).sites]
    assert found == pytest.approx([first + (last - first) * i / 7 for i in range(8)])


def test_subset_hooks_whole_branches() -> None:
    """Before a layer scale, because a branch runs on the samples that are kept."""
    model = timm.create_model("vit_small_patch14_dinov2", depth=2, img_size=28, patch_size=14)
    x = torch.randn(2, 3, 28, 28)
    drop = inject(model, stochastic_depth(1.0, mode="subset"), p_scale="equal", example_input=x)
    assert [site.name for site in drop.sites] == [f"blocks.{i}.{branch}" for i in (0, 1) for branch in ("attn", "mlp")]
    model(x).sum().backward()


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

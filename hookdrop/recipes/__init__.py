"""Regularizer placements from papers, as values for `inject` and `plan`.

Each is imported when it is first used, so that `import hookdrop` loads none of them.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hookdrop.recipes.base import Recipe as Recipe
    from hookdrop.recipes.depth import stochastic_depth as stochastic_depth
    from hookdrop.recipes.dropblock import dropblock_detector as dropblock_detector
    from hookdrop.recipes.dropblock import dropblock_resnet as dropblock_resnet
    from hookdrop.recipes.dropblock import timm_dropblock as timm_dropblock
    from hookdrop.recipes.embeddings import neftune as neftune
    from hookdrop.recipes.heads import head_dropout as head_dropout
    from hookdrop.recipes.layers import layer_drop as layer_drop
    from hookdrop.recipes.model_dropout import set_dropout as set_dropout
    from hookdrop.recipes.patches import patch_dropout as patch_dropout
    from hookdrop.recipes.residual import residual_dropout as residual_dropout
    from hookdrop.recipes.segmentation import dropblock_unet as dropblock_unet

RECIPE_MODULES = {
    "dropblock_detector": "dropblock",
    "dropblock_resnet": "dropblock",
    "dropblock_unet": "segmentation",
    "head_dropout": "heads",
    "layer_drop": "layers",
    "neftune": "embeddings",
    "patch_dropout": "patches",
    "residual_dropout": "residual",
    "set_dropout": "model_dropout",
    "stochastic_depth": "depth",
    "timm_dropblock": "dropblock",
}
"""The module of each recipe, by name."""

_MODULES = RECIPE_MODULES | {
    "Recipe": "base",
}

__all__ = [
    "Recipe",
    "dropblock_detector",
    "dropblock_resnet",
    "dropblock_unet",
    "head_dropout",
    "layer_drop",
    "neftune",
    "patch_dropout",
    "residual_dropout",
    "set_dropout",
    "stochastic_depth",
    "timm_dropblock",
]


def __getattr__(name: str) -> Any:
    if name == "RECIPES":
        return {recipe: __getattr__(recipe) for recipe in RECIPE_MODULES}
    if name not in _MODULES:
        raise AttributeError(f"module 'hookdrop.recipes' has no attribute {name!r}")
    return getattr(importlib.import_module(f"hookdrop.recipes.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

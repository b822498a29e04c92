"""Regularizer placements from papers. Each recipe takes a model and returns one injection.

`set_dropout` and `report_dropout` work on a model's built-in dropout.
"""

from hookdrop.recipes.depth import stochastic_depth
from hookdrop.recipes.detection import dropblock_detector
from hookdrop.recipes.dropblock import dropblock_resnet, timm_dropblock
from hookdrop.recipes.dropout_change import DropoutChange
from hookdrop.recipes.embeddings import neftune
from hookdrop.recipes.heads import head_dropout
from hookdrop.recipes.layers import layer_drop
from hookdrop.recipes.model_dropout import DropoutReport, report_dropout, set_dropout
from hookdrop.recipes.patches import patch_dropout
from hookdrop.recipes.recipe import Recipe
from hookdrop.recipes.residual import residual_dropout
from hookdrop.recipes.segmentation import dropblock_unet

RECIPES: dict[str, Recipe[...]] = {
    "dropblock_detector": dropblock_detector,
    "dropblock_resnet": dropblock_resnet,
    "dropblock_unet": dropblock_unet,
    "head_dropout": head_dropout,
    "layer_drop": layer_drop,
    "neftune": neftune,
    "patch_dropout": patch_dropout,
    "residual_dropout": residual_dropout,
    "stochastic_depth": stochastic_depth,
    "timm_dropblock": timm_dropblock,
}
"""All recipes by name."""

__all__ = [
    "DropoutChange",
    "DropoutReport",
    "Recipe",
    "dropblock_detector",
    "dropblock_resnet",
    "dropblock_unet",
    "head_dropout",
    "layer_drop",
    "neftune",
    "patch_dropout",
    "report_dropout",
    "residual_dropout",
    "set_dropout",
    "stochastic_depth",
    "timm_dropblock",
]

"""Named placements from papers: each takes a model, places, and returns one injection."""

from hookdrop.recipes.depth import stochastic_depth
from hookdrop.recipes.dropblock import dropblock_resnet, timm_dropblock
from hookdrop.recipes.recipe import Recipe

__all__ = ["Recipe", "dropblock_resnet", "stochastic_depth", "timm_dropblock"]

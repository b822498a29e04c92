"""Regularizer placements from papers, as values for `inject` and `plan`.

Each is imported when it is first used, so that `import hookdrop` loads none of them.
"""

from typing import TYPE_CHECKING, Any

from hookdrop.core.parts import RECIPES
from hookdrop.core.recipe import Recipe, RecipeSite

if TYPE_CHECKING:
    from hookdrop.methods.branches import layer_drop, residual_dropout, stochastic_depth
    from hookdrop.methods.dropblock import dropblock_detector, dropblock_resnet, dropblock_unet
    from hookdrop.methods.model_dropout import set_dropout
    from hookdrop.methods.tokens import drop_key, head_dropout, neftune, patch_dropout

__all__ = [
    "Recipe",
    "RecipeSite",
    "drop_key",
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
]
_FILES = {
    "branches": ("layer_drop", "residual_dropout", "stochastic_depth"),
    "dropblock": ("dropblock_detector", "dropblock_resnet", "dropblock_unet"),
    "model_dropout": ("set_dropout",),
    "tokens": ("drop_key", "head_dropout", "neftune", "patch_dropout"),
}
RECIPES.places.update({name: f"hookdrop.methods.{file}:{name}" for file, names in _FILES.items() for name in names})
RECIPE_NAMES = tuple(sorted(RECIPES))


def __getattr__(name: str) -> Any:
    if name in RECIPES:
        return RECIPES[name]
    raise AttributeError(f"module 'hookdrop.recipes' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Regularizer placements from papers, as values for `inject` and `plan`.

Each is imported when it is first used, so that `import hookdrop` loads none of them.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hookdrop.recipes.base import Recipe, RecipeSite
    from hookdrop.recipes.branches import layer_drop, residual_dropout, stochastic_depth
    from hookdrop.recipes.dropblock import dropblock_detector, dropblock_resnet, dropblock_unet
    from hookdrop.recipes.model_dropout import set_dropout
    from hookdrop.recipes.tokens import drop_key, head_dropout, neftune, patch_dropout

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
RECIPE_NAMES = tuple(name for name in __all__ if name not in ("Recipe", "RecipeSite"))


def __getattr__(name: str) -> Any:
    if name in __all__:
        for file in ("base", "branches", "dropblock", "model_dropout", "tokens"):
            module = importlib.import_module(f"hookdrop.recipes.{file}")
            if name in vars(module):
                return vars(module)[name]
    raise AttributeError(f"module 'hookdrop.recipes' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

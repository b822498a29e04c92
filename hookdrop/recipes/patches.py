"""PatchDropout: remove image patches, so that a vision transformer is trained on fewer tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from hookdrop.recipes.base import Recipe, RecipeSite
from hookdrop.regularizers import TokenDropout
from hookdrop.utils.errors import InjectionError, LayerError

if TYPE_CHECKING:
    from hookdrop.survey import Survey


@dataclass(frozen=True)
class patch_dropout(Recipe):
    """PatchDropout: in training, a vision transformer sees a random part of the patches, which saves time.

    Liu et al. 2022, arXiv:2208.07220. The site is the last layer before attention that returns the patches with their
    positions. Class and register tokens are kept: those that are equal for two images. Running the model with the
    patches in another order, and with half of them, shows that no later layer depends on their places. With the same
    seed, timm's `patch_drop_rate` keeps the same patches.

    Args:
        p: fraction of the patches to remove, in [0, 1).

    Raises:
        LayerError: the model has no such tokens, or later layers need all of them, as windows, relative positions, RoPE
            and heads for dense prediction do.
        InjectionError: the model already removes patches.

    Example:
        >>> import timm
        >>> model = timm.create_model("vit_tiny_patch16_224", depth=1)
        >>> drop = inject(model, patch_dropout(p=0.5))
        >>> drop.sites[0].name, drop.sites[0].regularizer
        ('pos_drop', 'TokenDropout(p=0.5, prefix=1, remove=True)')
    """

    p: float = 0.5

    def sites(self, model: nn.Module, survey: Survey) -> Sequence[RecipeSite]:
        from hookdrop.survey.tokens import TokensNeededError

        active = [name for name, module in model.named_modules() if type(module).__name__ == "PatchDropout"]
        if active:
            raise InjectionError(
                f"patch_dropout: the model already has it: {active[0]} is {model.get_submodule(active[0])!r}.\n"
                "  build the model with patch_drop_rate=0.0"
            )
        try:
            found = survey.patches
        except TokensNeededError as error:
            raise LayerError(
                f"patch_dropout does not apply to {type(model).__name__}: {error}.\n"
                "  zero tokens instead: inject(model, TokenDropout(p=...), layers=...)"
            ) from error
        return [RecipeSite(found.layer, TokenDropout(self.p, found.prefix, remove=True))]

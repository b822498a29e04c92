"""DropHead: dropout of attention heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from hookdrop.recipes.base import Recipe, RecipeSite
from hookdrop.regularizers import HeadDropout
from hookdrop.utils.errors import LayerError
from hookdrop.utils.tables import some

if TYPE_CHECKING:
    from hookdrop.survey import Survey


@dataclass(frozen=True)
class head_dropout(Recipe):
    """DropHead: zero whole attention heads, before the output projection of every attention layer.

    Zhou et al. 2020, arXiv:2004.13342. Running the model shows the projections, which features of their input belong to
    which head, and which rows belong to which sample. With grouped queries, these are the query heads.

    Args:
        p: probability of dropping a head, in [0, 1).

    Raises:
        LayerError: no layer gets separate heads. `nn.MultiheadAttention` does not call its output projection, so hooks
            cannot reach its heads.

    Example:
        >>> import timm
        >>> model = timm.create_model("vit_tiny_patch16_224", depth=2)
        >>> drop = inject(model, head_dropout(p=0.2))
        >>> [site.name for site in drop.sites]
        ['blocks.0.attn.proj', 'blocks.1.attn.proj']
    """

    p: float = 0.1

    def sites(self, model: nn.Module, survey: Survey) -> Sequence[RecipeSite]:
        found = [RecipeSite(name, self._regularizer(name, survey)) for name in survey.heads]
        if not found:
            reasons = [f"\n  {name!r}: {reason}" for name, reason in list(survey.no_heads.items())[:3]]
            raise LayerError(
                f"head_dropout found no layer of {type(model).__name__} whose input is attention heads side by side."
                + "".join(reasons)
            )
        return found

    def _regularizer(self, name: str, survey: Survey) -> HeadDropout:
        heads = survey.heads[name]
        return HeadDropout(self.p, heads.count, interleaved=heads.interleaved)

    def warnings(self, model: nn.Module, survey: Survey, sites: Sequence[RecipeSite]) -> Sequence[str]:
        skipped = survey.no_heads
        if not skipped:
            return ()
        reason = next(iter(skipped.values()))
        return [f"head_dropout skips {some(list(skipped))}, whose heads it cannot separate: {reason}."]

"""LayerDrop: skip whole transformer layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from hookdrop.recipes.base import Recipe, RecipeSite
from hookdrop.recipes.depth import require_branches, skipped_warnings
from hookdrop.regularizers import LayerDrop
from hookdrop.utils.errors import LayerError

if TYPE_CHECKING:
    from hookdrop.survey import Survey


@dataclass(frozen=True)
class layer_drop(Recipe):
    """LayerDrop: in each forward, every layer returns its input with probability `p`.

    Fan et al. 2020, arXiv:1909.11556. Unlike DropPath, it drops a layer for the whole batch and does not rescale. The
    layers are those that return their input plus residual branches, also with norms on the way, in the shape of the
    input: transformer layers, and blocks of CNNs without an activation after the addition.

    Every layer has the rate `p`, as in the paper. The rates of LayerSkip (Elhoushi et al. 2024, arXiv:2404.16710):
    `inject(..., p_scale=lambda name, i, n: 2 ** (i / (n - 1)) - 1)`.

    Args:
        p: probability of skipping a layer, in [0, 1).

    Raises:
        LayerError: the model has no such layer.
        InjectionError: in forward, a layer fills a KV cache.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> size = dict(num_hidden_layers=2, hidden_size=16, intermediate_size=16, num_attention_heads=2, vocab_size=9)
        >>> model = LlamaForCausalLM(LlamaConfig(**size, num_key_value_heads=2))
        >>> [site.name for site in inject(model, layer_drop(p=0.2)).sites]
        ['model.layers.0', 'model.layers.1']
    """

    p: float = 0.1

    def __post_init__(self) -> None:
        LayerDrop(self.p)

    def sites(self, model: nn.Module, survey: Survey) -> Sequence[RecipeSite]:
        require_branches(self, model, survey)
        names = [name for name, reason in survey.skippable.items() if not reason]
        if not names:
            name, reason = next(iter(survey.skippable.items()))
            raise LayerError(
                f"layer_drop found no layer of {type(model).__name__} that could be skipped: {name!r} could not, "
                f"because {reason}.\n  drop residual branches instead: stochastic_depth(p=...)"
            )
        return [RecipeSite(name, LayerDrop(self.p)) for name in names]

    def warnings(self, model: nn.Module, survey: Survey, sites: Sequence[RecipeSite]) -> Sequence[str]:
        skipped: dict[str, list[str]] = {}
        for name, reason in survey.skippable.items():
            if reason:
                skipped.setdefault(f"{reason}.", []).append(name)
        return skipped_warnings(model, survey, {*survey.skippable}, skipped)

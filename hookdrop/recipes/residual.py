"""Dropout for transformers that ship without dropout."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from hookdrop.recipes.base import Recipe, RecipeSite
from hookdrop.recipes.depth import require_branches, skipped_warnings
from hookdrop.regularizers import Dropout
from hookdrop.utils.errors import InjectionError, LayerError

if TYPE_CHECKING:
    from hookdrop.survey import Survey

_ATTENTION_DROPOUT = ("attn_drop", "attn_dropout", "attn_pdrop", "attention_dropout")
"""Rates of attention-weight dropout, which does not drop hidden states and may stay on."""


@dataclass(frozen=True)
class residual_dropout(Recipe):
    """Dropout in a transformer that ships without it, on what each branch adds to the residual stream.

    The sites are the ends of the residual branches: the outputs of attention and of the MLP in every layer; where a
    norm ends the branch (Gemma 2, OLMo 2), the output of the norm. The embeddings are not regularized. Vaswani et al.
    2017, arXiv:1706.03762, section 5.4.

    Every layer has the rate `p`. `inject(..., p_scale="depth_from_zero")` has 0 in the first layer to `p` in the last,
    as in LIMA (Zhou et al. 2023, arXiv:2305.11206, section 3). All branches of a layer have the same rate.

    Args:
        p: probability to zero an element.

    Raises:
        LayerError: the model has no layers with tokens (N, L, C) that are their input plus branches.
        InjectionError: the layers already have dropout.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> size = dict(num_hidden_layers=2, hidden_size=16, intermediate_size=16, num_attention_heads=2, vocab_size=9)
        >>> model = LlamaForCausalLM(LlamaConfig(**size, num_key_value_heads=2))
        >>> drop = inject(model, residual_dropout(p=0.1))
        >>> [site.name for site in drop.sites][:2]
        ['model.layers.0.self_attn', 'model.layers.0.mlp']
    """

    p: float = 0.1

    def __post_init__(self) -> None:
        Dropout(self.p)

    def sites(self, model: nn.Module, survey: Survey) -> Sequence[RecipeSite]:
        require_branches(self, model, survey)
        layers = [name for name, reason in survey.skippable.items() if not reason]
        inside = tuple(f"{name}." for name in layers)
        found = [one for one in survey.branches if f"{one.layer}.".startswith(inside) and len(one.shape) == 3]
        if not found:
            raise LayerError(
                f"residual_dropout found no transformer layer in {type(model).__name__}: it looks for layers with "
                "tokens (N, L, C) that are their input plus residual branches.\n"
                "  choose the layers yourself: inject(model, Dropout(p=0.1), layers=...)"
            )
        for name in dict.fromkeys(branch.layer for branch in found):
            _check_no_dropout(model, survey, name)
        return [RecipeSite(one.end, Dropout(self.p), group=one.layer) for one in found]

    def warnings(self, model: nn.Module, survey: Survey, sites: Sequence[RecipeSite]) -> Sequence[str]:
        return skipped_warnings(model, survey, {site.group for site in sites}, {})


def _check_no_dropout(model: nn.Module, survey: Survey, layer: str) -> None:
    adapters = [f"{name}." for name, module in model.named_modules() if _is_adapter(module)]
    for rate in survey.drop_rates.rates:
        inside = f"{rate.layer}.".startswith(f"{layer}.") and not rate.layer.startswith(tuple(adapters))
        value = getattr(model.get_submodule(rate.layer), rate.attribute, 0.0)
        name = f"{rate.layer}.{rate.attribute}"
        if inside and value and not name.removesuffix(".p").endswith(_ATTENTION_DROPOUT):
            raise InjectionError(
                f"residual_dropout: the model already has dropout: {name} is {value:g}.\n"
                "  change it: inject(model, set_dropout(p=p))   list all: print(hookdrop.plan(model, set_dropout()))"
            )


def _is_adapter(module: nn.Module) -> bool:
    """Whether a module is a LoRA layer or another PEFT adapter, whose dropout only applies to the adapter's input."""
    return any(re.search("lora|BaseTunerLayer", cls.__name__, re.IGNORECASE) for cls in type(module).__mro__)

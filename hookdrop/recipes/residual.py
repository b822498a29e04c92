"""Dropout for decoder-only transformers that ship without any."""

from __future__ import annotations

from typing import Any

from torch import nn

from hookdrop.errors import InjectionError
from hookdrop.injection.plan import Plan
from hookdrop.injection.select import Layer, walk
from hookdrop.recipes.branches import decoder_ends, left_out
from hookdrop.recipes.dropout_rates import rates
from hookdrop.recipes.recipe import Factory, Place, Recipe, nothing_to_do, plan_places
from hookdrop.regularizers import Dropout
from hookdrop.schedules import Schedule

_OF_ATTENTION = ("attn_drop", "attn_dropout", "attn_pdrop", "attention_dropout")
"""Dropout of attention weights, which is another thing."""


@Recipe
def residual_dropout(
    model: nn.Module,
    p: float = 0.1,
    regularizer: Factory = Dropout,
    *,
    schedule: Schedule | None = None,
    name: str = "residual_dropout",
    on_existing: str = "error",
    example_input: Any = None,
) -> Plan:
    """Dropout of hidden states in a decoder-only transformer: what each branch adds to the residual stream.

    On the output of attention and of the MLP in every layer, before the addition; where a norm ends the branch
    (Gemma 2, OLMo 2), after that. The embeddings are left alone. Vaswani et al. 2017, arXiv:1706.03762, section 5.4.

    Args:
        model: of transformers: LLaMA, Mistral, Mixtral, Qwen, Gemma, OLMo 2, Phi, GPT-2, GPT-NeoX and what is written
            like them; or a model with one inside (PEFT's).
        p: probability to zero an element.
        regularizer: called with `p=` for each site instead of `Dropout`.
        schedule, name, on_existing, example_input: as of `inject`.

    Raises:
        LayerError: no such layers are there.
        InjectionError: they have such a dropout on already.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> size = dict(num_hidden_layers=2, hidden_size=16, intermediate_size=16, num_attention_heads=2, vocab_size=9)
        >>> model = LlamaForCausalLM(LlamaConfig(**size, num_key_value_heads=2))
        >>> drop = residual_dropout(model, p=0.1)
        >>> [site.name for site in drop.sites][:2]
        ['model.layers.0.self_attn', 'model.layers.0.mlp']
    """
    found = [(layer, ends) for layer in walk(model) if (ends := decoder_ends(layer.module)) is not None]
    if not found:
        raise nothing_to_do(
            "residual_dropout", model, "decoder layers with input_layernorm, self_attn and mlp, or alike"
        )
    for layer, _ in found:
        _must_be_off(layer)
    places = [Place(f"{layer.name}.{end}") for layer, ends in found for end in ends]
    return plan_places(
        model,
        places,
        regularizer,
        p,
        schedule=schedule,
        name=name,
        on_existing=on_existing,
        example_input=example_input,
        warnings=left_out(model, {layer.name for layer, _ in found}),
    )


def _must_be_off(layer: Layer) -> None:
    for rate in rates(layer.module):
        if rate.value and not rate.name.endswith(_OF_ATTENTION):
            raise InjectionError(
                f"residual_dropout: the model has dropout of its own: {layer.name}.{rate.name} is {rate.value:g}.\n"
                '  change it: hookdrop.recipes.set_dropout(model, {"**": p})   what is there: report_dropout(model)'
            )

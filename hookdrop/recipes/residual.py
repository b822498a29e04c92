"""Dropout for decoder-only transformers that ship without dropout."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from hookdrop.errors import InjectionError
from hookdrop.injection.plan import Plan
from hookdrop.injection.resolve import LazySurvey, PScale
from hookdrop.recipes.branches import decoder_ends
from hookdrop.recipes.model_dropout import current_rates
from hookdrop.recipes.recipe import Factory, Recipe, RecipeSite, layer_factors, plan_sites, require_sites
from hookdrop.recipes.skipped import skipped_layers
from hookdrop.regularizers import Dropout
from hookdrop.schedules import Schedule
from hookdrop.utils.names import unwrapped
from hookdrop.utils.select import Layer, named_layers

if TYPE_CHECKING:
    from hookdrop.survey import Survey

_ATTENTION_DROPOUT = ("attn_drop", "attn_dropout", "attn_pdrop", "attention_dropout")
"""Rates of attention-weight dropout, which does not drop hidden states and may stay on."""


@Recipe
def residual_dropout(
    model: nn.Module,
    p: float = 0.1,
    p_scale: PScale | None = None,
    regularizer: Factory = Dropout,
    *,
    schedule: Schedule | str | None = None,
    total_steps: int | None = None,
    name: str = "residual_dropout",
    on_existing: str = "error",
    portable: bool = False,
    example_input: Any = None,
) -> Plan:
    """Inject dropout into a decoder-only transformer, on what each branch adds to the residual stream.

    The sites are the outputs of attention and of the MLP in every layer, before the addition; where a norm ends the
    branch (Gemma 2, OLMo 2), the output of the norm. The embeddings are not regularized. Vaswani et al. 2017,
    arXiv:1706.03762, section 5.4.

    Args:
        model: LLaMA, Mistral, Mixtral, Qwen, Gemma, OLMo 2, Phi, GPT-2, GPT-NeoX or a similar model of transformers,
            or a model that contains one (a PEFT model).
        p: probability to zero an element.
        p_scale: scales `p` by layer, as in `inject`: `"depth_from_zero"` for 0 in the first layer to `p` in the last,
            as in LIMA (Zhou et al. 2023, arXiv:2305.11206, section 3); None for `p` in every layer. Both branches of
            a layer have the same rate.
        regularizer: called with `p=` for each site instead of `Dropout`.
        schedule, total_steps, name, on_existing, portable, example_input: as in `inject`.

    Raises:
        LayerError: the model has no such layers.
        InjectionError: the layers already have dropout, or torch.fx traced them.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> size = dict(num_hidden_layers=2, hidden_size=16, intermediate_size=16, num_attention_heads=2, vocab_size=9)
        >>> model = LlamaForCausalLM(LlamaConfig(**size, num_key_value_heads=2))
        >>> drop = residual_dropout(model, p=0.1)
        >>> [site.name for site in drop.sites][:2]
        ['model.layers.0.self_attn', 'model.layers.0.mlp']
    """
    found = [(layer, ends) for layer in named_layers(model) if (ends := decoder_ends(layer.module)) is not None]
    scales = layer_factors([layer for layer, _ in found], p_scale)
    sites = [
        RecipeSite(f"{layer.name}.{end}", {"p": p}, scale)
        for (layer, ends), scale in zip(found, scales, strict=True)
        for end in ends
    ]
    wanted = "decoder layers with input_layernorm, self_attn and mlp, or similar"
    require_sites("residual_dropout", model, [site.name for site in sites], wanted)
    _check_no_dropout(model, [layer for layer, _ in found], example_input)
    skipped = skipped_layers(model, {layer.name for layer, _ in found})
    return plan_sites(
        model,
        sites,
        regularizer,
        skipped,
        schedule=schedule,
        total_steps=total_steps,
        name=name,
        on_existing=on_existing,
        portable=portable,
        example_input=example_input,
    )


def _check_no_dropout(model: nn.Module, layers: list[Layer], example_input: Any) -> None:
    inside = {id(part) for layer in layers for part in layer.module.modules()}
    adapters = {id(part) for module in model.modules() if _is_adapter(module) for part in module.modules()}
    root, survey = unwrapped(model), cast("Survey", LazySurvey(model, example_input))
    for name, (rate, value) in current_rates(root, survey).items():
        module = id(root.get_submodule(rate.layer))
        if value and module in inside - adapters and not name.endswith(_ATTENTION_DROPOUT):
            raise InjectionError(
                f"residual_dropout: the model already has dropout: {name} is {value:g}.\n"
                "  change it: inject(model, set_dropout(p=p))   list all: print(hookdrop.plan(model, set_dropout()))"
            )


def _is_adapter(module: nn.Module) -> bool:
    """Whether a module is a LoRA layer or another PEFT adapter, whose dropout only applies to the adapter's input."""
    return any(re.search("lora|BaseTunerLayer", cls.__name__, re.IGNORECASE) for cls in type(module).__mro__)

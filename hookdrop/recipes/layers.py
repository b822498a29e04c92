"""LayerDrop: skip whole transformer layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from hookdrop.injection.plan import Plan
from hookdrop.injection.resolve import PScale
from hookdrop.recipes.branches import blocks
from hookdrop.recipes.recipe import Factory, Recipe, RecipeSite, layer_factors, plan_sites, require_sites
from hookdrop.recipes.skipped import skipped_layers
from hookdrop.regularizers import LayerDrop
from hookdrop.schedules import Schedule
from hookdrop.utils.select import Layer, layers_by_name


@Recipe
def layer_drop(
    model: nn.Module,
    p: float = 0.1,
    p_scale: PScale | None = None,
    regularizer: Factory = LayerDrop,
    *,
    schedule: Schedule | str | None = None,
    total_steps: int | None = None,
    name: str = "layer_drop",
    on_existing: str = "error",
    portable: bool = False,
    example_input: Any = None,
) -> Plan:
    """Inject LayerDrop: in each forward, every transformer layer returns its input with probability `p`.

    Fan et al. 2020, arXiv:1909.11556. Unlike DropPath, it drops a layer for the whole batch and does not rescale.

    Args:
        model: a model with the transformer layers that `stochastic_depth` recognizes.
        p: probability of skipping a layer, in [0, 1).
        p_scale: scales `p` by layer, as in `inject`; None uses `p` in every layer, as in the paper. The rates of
            LayerSkip (Elhoushi et al. 2024, arXiv:2404.16710): `lambda name, i, n: 2 ** (i / (n - 1)) - 1`.
        regularizer: called with `p=` for each site instead of `LayerDrop`.
        schedule, total_steps, name, on_existing, portable, example_input: as in `inject`.

    Raises:
        LayerError: the recipe recognizes no transformer layer.
        InjectionError: torch.fx traced the model; or, in forward, a layer fills a KV cache.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> size = dict(num_hidden_layers=2, hidden_size=16, intermediate_size=16, num_attention_heads=2, vocab_size=9)
        >>> model = LlamaForCausalLM(LlamaConfig(**size, num_key_value_heads=2))
        >>> [site.name for site in layer_drop(model, p=0.2).sites]
        ['model.layers.0', 'model.layers.1']
    """
    found = transformer_layers(model)
    wanted = "transformer layers with a known structure (for residual CNNs, use stochastic_depth)"
    require_sites("layer_drop", model, [layer.name for layer in found], wanted)
    scales = layer_factors(found, p_scale)
    return plan_sites(
        model,
        [RecipeSite(layer.name, {"p": p}, scale) for layer, scale in zip(found, scales, strict=True)],
        regularizer,
        skipped_layers(model, {layer.name for layer in found}),
        schedule=schedule,
        total_steps=total_steps,
        name=name,
        on_existing=on_existing,
        portable=portable,
        example_input=example_input,
    )


def transformer_layers(model: nn.Module) -> list[Layer]:
    """Return the layers that the residual blocks of a transformer form, in `named_modules()` order."""
    layers, found = layers_by_name(model), {}
    for block, ends in blocks(model):
        # Blocks with batch norm are those of CNNs, many of which change the shape.
        if ends and not any(isinstance(part, nn.BatchNorm2d | nn.BatchNorm3d) for part in block.module.modules()):
            layer = _around(block, layers)
            found[layer.name] = layer
    return list(found.values())


def _around(block: Layer, layers: Mapping[str, Layer]) -> Layer:
    """Return the layer that a block is a part of: T5's layers are lists of different blocks with one branch each."""
    container, _, _ = block.name.rpartition(".")
    owner, _, _ = container.rpartition(".")
    kinds = {type(part) for part in layers[container].module.children()} if container else set()
    is_part = owner in layers and isinstance(layers[container].module, nn.ModuleList) and len(kinds) > 1
    above = layers.get(owner.rpartition(".")[0]) if is_part else None
    return layers[owner] if above is not None and isinstance(above.module, nn.ModuleList) else block

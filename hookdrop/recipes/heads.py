"""DropHead: dropout of attention heads."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from hookdrop.injection.plan import Plan
from hookdrop.injection.resolve import PScale
from hookdrop.recipes.recipe import Factory, Recipe, RecipeSite, layer_factors, plan_sites, require_sites
from hookdrop.recipes.source_analysis import dotted_path, reachable_methods
from hookdrop.regularizers import HeadDropout
from hookdrop.regularizers.head_dropout import heads_of
from hookdrop.schedules import Schedule
from hookdrop.utils.names import unwrapped
from hookdrop.utils.select import Layer, layers_by_name, named_layers

_PROJECTIONS = (
    *("o_proj", "out_proj", "proj", "c_proj", "o", "out_lin", "dense", "output.dense"),
    *("wo", "to_out.0", "merge", "attn_out", "output_proj", "proj_out"),
)
"""Names of the output projection within attention: `output.dense` is BERT's, `merge` that of torchvision's MaxViT."""


@Recipe
def head_dropout(
    model: nn.Module,
    p: float = 0.1,
    p_scale: PScale | None = None,
    regularizer: Factory = HeadDropout,
    *,
    schedule: Schedule | str | None = None,
    total_steps: int | None = None,
    name: str = "head_dropout",
    on_existing: str = "error",
    portable: bool = False,
    example_input: Any = None,
) -> Plan:
    """Inject DropHead: zero whole attention heads, before the output projection of every attention layer.

    Zhou et al. 2020, arXiv:2004.13342. The number of heads comes from the model. With grouped-query attention, they are
    the query heads.

    Args:
        model: a model with attention layers of timm or transformers (ViT, BERT, LLaMA, T5, ...), or of torchvision's
            MaxViT. The other transformers of torchvision use `nn.MultiheadAttention`, which does not call its output
            projection as a module, so no hook can reach their heads.
        p: probability of dropping a head, in [0, 1).
        p_scale: scales `p` by layer, as in `inject`.
        regularizer: called with `p=` for each site instead of `HeadDropout`.
        schedule, total_steps, name, on_existing, portable, example_input: as in `inject`.

    Raises:
        LayerError: the recipe finds no output projection of attention, or the heads do not divide its input.

    Example:
        >>> import timm
        >>> model = timm.create_model("vit_tiny_patch16_224", depth=2)
        >>> drop = head_dropout(model, p=0.2)
        >>> [site.name for site in drop.sites]
        ['blocks.0.attn.proj', 'blocks.1.attn.proj']
    """
    found = list(_projections(model))
    wanted = "an output projection (o_proj, attn.proj, ...) inside attention whose number of heads is known"
    if any(isinstance(layer.module, nn.MultiheadAttention) for layer in named_layers(model)):
        wanted += " (nn.MultiheadAttention does not call its projection, so hooks cannot reach its heads)"
    require_sites("head_dropout", model, [layer.name for layer in found], wanted)
    scales = layer_factors(found, p_scale)
    return plan_sites(
        model,
        [RecipeSite(layer.name, {"p": p}, scale) for layer, scale in zip(found, scales, strict=True)],
        regularizer,
        schedule=schedule,
        total_steps=total_steps,
        name=name,
        on_existing=on_existing,
        portable=portable,
        example_input=example_input,
    )


def _projections(model: nn.Module) -> Iterator[Layer]:
    """Yield the output projections of attention whose number of heads is known and at least two."""
    layers = layers_by_name(model)
    for layer in named_layers(model):
        if not re.search("att(entio)?n", type(layer.module).__name__, re.IGNORECASE):
            continue
        names = [f"{layer.name}.{end}" if layer.name else end for end in _PROJECTIONS]
        end = next((layers[name] for name in names if name in layers and _is_linear(layers[name].module)), None)
        if end is not None and _is_called(end.name, layers) and (heads_of(unwrapped(model), end.name) or 1) > 1:
            yield end


def _is_called(name: str, layers: Mapping[str, Layer]) -> bool:
    """Whether a layer is called, according to the source of its parent, which might use only its weight instead."""
    parent, _, attribute = name.rpartition(".")
    methods, unreadable = reachable_methods(type(layers[parent].module))
    calls = (node for method in methods for node in method.nodes if isinstance(node, ast.Call))
    return bool(unreadable) or any((dotted_path(call.func) or ())[1:] == (attribute,) for call in calls)


def _is_linear(module: nn.Module) -> bool:
    """Whether a module maps the last axis: a linear layer, possibly with an adapter, or the `Conv1D` of GPT-2."""
    base = getattr(module, "base_layer", module)
    return isinstance(base, nn.Linear) or type(base).__name__ in ("Conv1D", "Linear4bit", "Linear8bitLt")

"""Stochastic depth: whole residual branches, more often the deeper they are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

from hookdrop.errors import InjectionError, LayerError
from hookdrop.injection.plan import Plan
from hookdrop.injection.scale import PScale, factors
from hookdrop.injection.select import Layer, walk
from hookdrop.recipes.branches import blocks, left_out
from hookdrop.recipes.recipe import Factory, Place, Recipe, nothing_to_do, plan_places
from hookdrop.regularizers import DropPath
from hookdrop.schedules import Schedule

_RATES = ("drop_prob", "p")


@Recipe
def stochastic_depth(
    model: nn.Module,
    p: float = 0.1,
    mode: str = "row",
    p_scale: PScale | None = "depth_from_zero",
    regularizer: Factory | None = None,
    *,
    schedule: Schedule | None = None,
    name: str = "stochastic_depth",
    on_existing: str = "error",
    example_input: Any = None,
) -> Plan:
    """DropPath at the end of each residual branch, so that a sample skips the branch as a whole.

    The rate grows from 0 at the first block to `p` at the last. Huang et al. 2016, arXiv:1603.09382, section 3.

    Args:
        model: with residual blocks as in ResNet, ConvNeXt, EfficientNet, Swin or ViT of torchvision, in timm's models,
            in BERT, ViT, CLIP, T5, GPT or LLaMA of transformers, and in what is written like them.
        p: the rate of the last block.
        mode: `"row"` for each sample by itself, `"batch"` for all together.
        p_scale: of the blocks, as of `inject`: `"depth_from_zero"` as in timm and most of torchvision, `"depth"` as in
            the paper, None for p everywhere. EfficientNets of both libraries count i / n: `lambda name, i, n: i / n`.
        regularizer: called with `p=` for each site instead of `DropPath`.
        schedule, name, on_existing, example_input: as of `inject`.

    Raises:
        LayerError: no residual block is there that is known.
        InjectionError: the model has stochastic depth on already.

    Example:
        >>> import torchvision
        >>> model = torchvision.models.resnet18()
        >>> drop = stochastic_depth(model, p=0.2)
        >>> [(site.name, round(site.p, 3)) for site in drop.sites][-2:]
        [('layer4.0.bn2', 0.171), ('layer4.1.bn2', 0.2)]
    """
    if regularizer is not None and mode != "row":
        raise ValueError(f"stochastic_depth: mode={mode!r} is DropPath's; give it to your regularizer instead.")
    found = list(blocks(model))
    if not any(ends for _, ends in found):
        raise nothing_to_do("stochastic_depth", model, "residual blocks of a kind that it knows")
    ends = [(f"{block.name}.{end}", block.module.get_submodule(end)) for block, ends in found for end in ends]
    _must_be_off(model, ends)
    _must_be_own(ends)
    places = [
        Place(f"{block.name}.{end}", p_scale=factor)
        for (block, ends), factor in zip(found, _factors([block for block, _ in found], p_scale), strict=True)
        for end in ends
    ]
    return plan_places(
        model,
        places,
        partial(DropPath, mode=mode) if regularizer is None else regularizer,
        p,
        schedule=schedule,
        name=name,
        on_existing=on_existing,
        example_input=example_input,
        warnings=left_out(model, {block.name for block, _ in found}),
    )


def _factors(layers: Sequence[Layer], p_scale: PScale | None) -> Sequence[float]:
    return [1.0] * len(layers) if p_scale is None else factors(list(layers), p_scale)


def _must_be_off(model: nn.Module, ends: Sequence[tuple[str, nn.Module]]) -> None:
    for name, module in ends:
        rate = next((getattr(module, rate) for rate in _RATES if hasattr(module, rate)), 0.0)
        if rate and not isinstance(module, nn.Dropout):
            raise InjectionError(
                f"stochastic_depth: the model has it on already: {name!r} is a {type(module).__name__} at {rate:g}.\n"
                "  build it without (drop_path_rate=0.; in torchvision stochastic_depth_prob=0.), or change its "
                f"rate: hookdrop.recipes.set_dropout(model, {{'**.{name.rpartition('.')[2]}': p}})"
            )
    for layer in walk(model):
        rate = vars(layer.module).get("drop_path")
        if isinstance(rate, float) and rate:
            raise InjectionError(
                f"stochastic_depth: the model has it on already: {layer.name}.drop_path is {rate:g}.\n"
                "  build it without, or set that to 0."
            )


def _must_be_own(ends: Sequence[tuple[str, nn.Module]]) -> None:
    first: dict[int, str] = {}
    for name, module in ends:
        if first.setdefault(id(module), name) != name:
            raise LayerError(
                f"stochastic_depth: {first[id(module)]!r} and {name!r} are one module, which can't have two rates.\n"
                "  give each block one of its own."
            )

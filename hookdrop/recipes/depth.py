"""Stochastic depth: drop whole residual branches, at a rate that grows with depth."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from hookdrop.errors import InjectionError, LayerError
from hookdrop.injection.plan import Plan
from hookdrop.injection.resolve import PScale
from hookdrop.recipes.branches import blocks
from hookdrop.recipes.recipe import Factory, Recipe, RecipeSite, layer_factors, plan_sites, require_sites
from hookdrop.recipes.skipped import skipped_layers, skipped_stacks
from hookdrop.recipes.subset import whole_branches
from hookdrop.recipes.transformer_layers import rows_are_samples
from hookdrop.regularizers import DropPath
from hookdrop.schedules import Schedule
from hookdrop.utils.select import Layer, named_layers
from hookdrop.utils.tables import some

_RATES = ("drop_prob", "p")


@Recipe
def stochastic_depth(
    model: nn.Module,
    p: float = 0.1,
    mode: str = "row",
    p_scale: PScale | None = "depth_from_zero",
    regularizer: Factory | None = None,
    *,
    schedule: Schedule | str | None = None,
    total_steps: int | None = None,
    name: str = "stochastic_depth",
    on_existing: str = "error",
    portable: bool = False,
    example_input: Any = None,
) -> Plan:
    """Inject DropPath at the end of each residual branch, so that a sample skips the whole branch.

    The rate grows from 0 at the first block to `p` at the last. Huang et al. 2016, arXiv:1603.09382, section 3.

    Args:
        model: a model with the residual blocks of torchvision's ResNet, ConvNeXt, EfficientNet, Swin or ViT, of timm,
            or of transformers. The plan warns about layers that the recipe does not recognize.
        p: drop probability of the last block.
        mode: `"row"` draws for each sample, and skips layers in which the first axis is not the batch, such as those
            of packed images; `"batch"` draws once for the whole batch, in these layers too.
            `"subset"` runs each branch on a part of the batch, which saves time (see `DropPath`): for LLaMA, CLIP,
            timm's ViT, and other models whose branches are modules.
        p_scale: scales `p` by block, as in `inject`: `"depth_from_zero"` as in timm and most of torchvision, `"depth"`
            as in the paper, None for `p` in every block. Both libraries' EfficientNets: `lambda name, i, n: i / n`.
        regularizer: called with `p=` for each site instead of `DropPath`.
        schedule, total_steps, name, on_existing, portable, example_input: as in `inject`.

    Raises:
        LayerError: the recipe recognizes no residual block of the model, or the first axis of none is the batch; or,
            with `mode="subset"`, the branches are not modules, or have batch norm.
        InjectionError: the model already has stochastic depth, or torch.fx traced it.

    Example:
        >>> import torchvision
        >>> model = torchvision.models.resnet18()
        >>> drop = stochastic_depth(model, p=0.2)
        >>> [(site.name, round(site.p, 3)) for site in drop.sites][-2:]
        [('layer4.0.bn2', 0.171), ('layer4.1.bn2', 0.2)]
    """
    if regularizer is not None and mode != "row":
        raise ValueError(f"stochastic_depth: mode={mode!r} only applies to DropPath; pass it to your regularizer.")
    every = list(blocks(model))
    found = [(block, ends) for block, ends in every if mode == "batch" or rows_are_samples(block.module)]
    ends = {f"{block.name}.{end}": block.module.get_submodule(end) for block, ends in found for end in ends}
    wanted = "residual blocks with a known structure"
    if not ends and any(found for _, found in every):
        wanted += ' with the batch on the first axis (mode="batch" accepts other layouts, such as packed sequences)'
    require_sites("stochastic_depth", model, list(ends), wanted)
    _check_no_stochastic_depth(model, ends)
    _check_no_shared_ends(ends)
    if mode == "subset":
        found = [(block, _require_whole_branches(block, ends)) for block, ends in found]
    scales = layer_factors([block for block, _ in found], p_scale)
    sites = [
        RecipeSite(f"{block.name}.{end}", {"p": p}, scale)
        for (block, ends), scale in zip(found, scales, strict=True)
        for end in ends
    ]
    make = partial(DropPath, mode=mode) if regularizer is None else regularizer
    known = {block.name for block, _ in found}
    others = {block.name for block, _ in every} - known
    skipped = skipped_layers(model, known | others) + skipped_stacks(model, known, others)
    return plan_sites(
        model,
        sites,
        make,
        skipped,
        schedule=schedule,
        total_steps=total_steps,
        name=name,
        on_existing=on_existing,
        portable=portable,
        example_input=example_input,
    )


def _require_whole_branches(block: Layer, ends: tuple[str, ...]) -> tuple[str, ...]:
    branches = whole_branches(block.module, ends)
    if ends and not branches:
        raise LayerError(
            f"stochastic_depth: mode='subset' needs branches that are modules, and those of {block.name!r} "
            f'({type(block.module).__name__}), which end at {some(list(ends))}, are not.\n  use mode="row"'
        )
    return branches


def _check_no_stochastic_depth(model: nn.Module, ends: Mapping[str, nn.Module]) -> None:
    for name, module in ends.items():
        rate = next((getattr(module, rate) for rate in _RATES if hasattr(module, rate)), 0.0)
        if rate and not isinstance(module, nn.Dropout):
            raise InjectionError(
                f"stochastic_depth: the model already has it: {name!r} is a {type(module).__name__} at rate {rate:g}.\n"
                "  build the model without it (timm: drop_path_rate=0.0, torchvision: stochastic_depth_prob=0.0), or "
                f"change its rate: inject(model, set_dropout(p={{'**.{name.rpartition('.')[2]}': p}}))"
            )
    for layer in named_layers(model):
        rate = vars(layer.module).get("drop_path")
        if isinstance(rate, float) and rate:
            raise InjectionError(
                f"stochastic_depth: the model already has it: {layer.name}.drop_path is {rate:g}.\n"
                "  build the model without it, or set the attribute to 0."
            )


def _check_no_shared_ends(ends: Mapping[str, nn.Module]) -> None:
    first: dict[int, str] = {}
    for name, module in ends.items():
        if first.setdefault(id(module), name) != name:
            raise LayerError(
                f"stochastic_depth: {first[id(module)]!r} and {name!r} are the same module, which cannot have "
                "two rates.\n  give each block its own module."
            )

"""DropBlock with the placement of its paper, and with that of timm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from hookdrop.errors import InjectionError
from hookdrop.injection.plan import Plan
from hookdrop.recipes.branches import has_submodules
from hookdrop.recipes.recipe import Factory, Recipe, RecipeSite, plan_sites, require_sites
from hookdrop.recipes.residual_stages import example_call, last_stages
from hookdrop.regularizers import DropBlock
from hookdrop.schedules import LinearSchedule, Schedule
from hookdrop.utils.select import named_layers

_TIMM = {-2: (5, 0.25), -1: (3, 1.0)}
"""timm's block size and gamma scale for the last two stages of a ResNet."""
RESIDUAL_CNN = "a ResNet, or another CNN whose last two stages have residual blocks with a known structure"
_MULTI_KERNEL_CONVS = ("SplitAttn", "SelectiveKernel")


@Recipe
def dropblock_resnet(
    model: nn.Module,
    p: float = 0.1,
    block_size: int = 7,
    steps: int | float | None = None,
    regularizer: Factory = DropBlock,
    *,
    total_steps: int | None = None,
    name: str = "dropblock_resnet",
    on_existing: str = "error",
    portable: bool = False,
    example_input: Any = None,
) -> Plan:
    """Inject DropBlock as in its paper: in groups 3 and 4 of a ResNet, after every convolution and on the skips.

    The sites are the norm of every convolution (before or after the ReLU gives the same result), the norm of a
    projection, and identity skips. An identity skip has no module: there the block computes f(x) + D(x). Group 3 uses a
    quarter of the rate. In other CNNs, the last two resolutions are groups 3 and 4. Ghiasi et al. 2018,
    arXiv:1810.12890, section 4.1.

    Args:
        model: a ResNet of torchvision, timm or transformers, another CNN of residual blocks (ResNetV2, RegNet, Res2Net,
            EfficientNet, MobileNet, ReXNet, timm's byobnet), or a model that contains one.
        p: drop probability in group 4; group 3 uses a quarter of it. The paper uses 0.1 (keep_prob 0.9).
        block_size: edge of the dropped squares, in pixels of the feature map; 7 in the paper.
        steps: optimizer steps over which keep_prob falls linearly from 1 to 1 - p, or a fraction of the training; None
            uses `p` from the start.
        regularizer: called with `p=` and `block_size=` for each site.
        total_steps, name, on_existing, portable, example_input: as in `inject`.

    Raises:
        LayerError: the model contains no such CNN, or its last two stages also have blocks of another kind.
        InjectionError: torch.fx traced the ResNet.

    Example:
        >>> import torchvision
        >>> model = torchvision.models.resnet18()
        >>> drop = dropblock_resnet(model, p=0.1, block_size=3, steps=100)
        >>> drop
        <Injection 'dropblock_resnet': 12 sites, p=0 of 0.1, step 0 of LinearSchedule(steps=100)>
        >>> [site.name for site in drop.sites if site.name.startswith("layer4")]
        ['layer4.0.bn1', 'layer4.0.bn2', 'layer4.0.downsample', 'layer4.1', 'layer4.1.bn1', 'layer4.1.bn2']
    """
    sites = paper_sites(model, p, block_size)
    require_sites("dropblock_resnet", model, [site.name for site in sites], RESIDUAL_CNN, example_call(model))
    schedule = None if steps is None else LinearSchedule(steps=steps)
    return plan_sites(
        model,
        sites,
        regularizer,
        schedule=schedule,
        total_steps=total_steps,
        name=name,
        on_existing=on_existing,
        portable=portable,
        example_input=example_input,
    )


def paper_sites(model: nn.Module, p: float, block_size: int) -> list[RecipeSite]:
    """Return the sites of the paper: in the last two stages, after each convolution and on the skip of each block."""
    settings = {"p": p, "block_size": block_size}
    sites = []
    for layer, block, scale in last_stages(model):
        if block.skip == "":
            sites.append(RecipeSite(layer.name, settings, scale, "skip", block.branch))
        names = (block.skip, *block.convs) if block.skip else block.convs
        sites += [RecipeSite(f"{layer.name}.{name}", settings, scale) for name in names]
    return sites


@Recipe
def timm_dropblock(
    model: nn.Module,
    p: float = 0.1,
    regularizer: Factory | None = None,
    *,
    schedule: Schedule | str | None = None,
    total_steps: int | None = None,
    name: str = "timm_dropblock",
    on_existing: str = "error",
    portable: bool = False,
    example_input: Any = None,
) -> Plan:
    """Inject DropBlock with the sites, block sizes and rates of `timm.create_model(..., drop_block_rate=p)`.

    Each block of the last two stages has one site: block size 5 at a quarter of the rate, then block size 3.

    Args:
        model: a timm model that accepts `drop_block_rate` (ResNet, ResNeXt, SE- and ECA-ResNet, Res2Net, ResNeSt,
            SKNet, and most byobnet models), built without it.
        p: timm's `drop_block_rate`, the drop probability of the last stage.
        regularizer: called with `p=`, `block_size=` and `gamma_scale=` for each site; None is `DropBlock` at
            p * gamma_scale. timm's own: `lambda p, block_size, gamma_scale: DropBlock2d(p, block_size, gamma_scale)`.
        schedule, total_steps, name, on_existing, portable, example_input: as in `inject`.

    Raises:
        LayerError: the model has no such site.
        InjectionError: the model was built with `drop_block_rate`, or torch.fx traced it.

    Example:
        >>> import timm
        >>> model = timm.create_model("resnet18")
        >>> drop = timm_dropblock(model, p=0.1)
        >>> [(site.name, site.p) for site in drop.sites]  # doctest: +NORMALIZE_WHITESPACE
        [('layer3.0.drop_block', 0.025), ('layer3.1.drop_block', 0.025),
         ('layer4.0.drop_block', 0.1), ('layer4.1.drop_block', 0.1)]
    """
    sites = [
        RecipeSite(site, {"p": p, "block_size": block_size, "gamma_scale": gamma_scale})
        for site, block_size, gamma_scale in _timm_sites(model)
    ]
    wanted = "the modules that timm's drop_block_rate replaces"
    require_sites("timm_dropblock", model, [site.name for site in sites], wanted)
    make = _scaled_drop_block if regularizer is None else regularizer
    return plan_sites(
        model,
        sites,
        make,
        schedule=schedule,
        total_steps=total_steps,
        name=name,
        on_existing=on_existing,
        portable=portable,
        example_input=example_input,
    )


def _scaled_drop_block(p: float, block_size: int, gamma_scale: float) -> DropBlock:
    return DropBlock(p * gamma_scale, block_size)


def _timm_sites(model: nn.Module) -> Iterator[tuple[str, int, float]]:
    """Yield (name, block size, gamma scale) of each module that `drop_block_rate` replaces; an Identity without it."""
    layers = {layer.name: layer.module for layer in named_layers(model)}
    for name, block in layers.items():
        stage, _, index = name.rpartition(".")
        settings = _TIMM.get(_stage_from_end(stage, layers)) if index.isdigit() else None
        if settings is None:
            continue
        for place in _timm_sites_in_block(block):
            if type(block.get_submodule(place)).__name__ == "DropBlock2d":
                raise InjectionError(
                    f"timm_dropblock: the model already has it: {name}.{place} is a DropBlock2d.\n"
                    "  build the model with drop_block_rate=0.0"
                )
            yield f"{name}.{place}", *settings


def _stage_from_end(stage: str, layers: Mapping[str, nn.Module]) -> int:
    """Return -1 for the last stage of a timm ResNet, -2 for the stage before it, and 0 for other modules."""
    parent, _, last = stage.rpartition(".")
    if last in ("layer3", "layer4"):
        return int(last[-1]) - 5
    return int(last) - len(layers[parent]) if parent.endswith("stages") and last.isdigit() else 0  # type: ignore[arg-type]


def _timm_sites_in_block(block: nn.Module) -> Iterator[str]:
    """Yield the names in one block. Split attention and selective kernels differ from plain convolutions."""
    kernels = {name: part for name, part in block.named_modules() if type(part).__name__ in _MULTI_KERNEL_CONVS}
    for name, part in kernels.items():
        if has_submodules(part, "drop"):
            yield f"{name}.drop"
        for path in getattr(part, "paths", nn.ModuleList()).named_children():
            yield f"{name}.paths.{path[0]}.bn.drop"
    if not kernels and not has_submodules(block, "transformer"):  # MobileViT's outer convolutions have no site
        places = ("drop_block", "conv2_kxk.bn.drop", "conv1_kxk.bn.drop", "conv_kxk.bn.drop")
        yield from [place for place in places if has_submodules(block, place)][:1]

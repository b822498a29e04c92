"""Find the residual blocks of a CNN, what the paper of DropBlock regularizes in each, and the last two stages.

A block is recognized by the names of its layers, not by its class name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.conv import _ConvNd

from hookdrop.errors import LayerError
from hookdrop.recipes.branches import has_submodules, norms_follow_convs
from hookdrop.recipes.conv_blocks import conv_blocks
from hookdrop.utils.select import Layer, named_layers
from hookdrop.utils.tables import some

_RESNET_GROUPS = {"layer3": 0.25, "layer4": 1.0}
"""The names of groups 3 and 4 in ResNets, and the fraction of the rate in each."""
_HEAD = re.compile(r"(^|\.)(\w*head\w*|rpn|classifier|pre_logits|fc)\.")
"""Layers after the last stage."""
_GATES = ("se", "attn", "attn_last", "self_attn", "eca", "gc")
"""Gates inside a block. Their convolutions act on pooled maps, or make attention maps."""


@dataclass(frozen=True)
class ResidualBlock:
    """What is regularized in a residual block; the names are relative to the block."""

    convs: tuple[str, ...]
    """The norms of its convolutions; of a pre-activation block, also its last convolution."""
    skip: str | None
    """The module on the skip, `""` for an identity skip without a module, None without a skip."""
    branch: str
    """The first layer of the residual branch."""


@dataclass(frozen=True)
class _Family:
    """Blocks with the same structure."""

    branch: str
    """The layers of the branch, in the order of the forward. A question mark follows those that may be absent."""
    skip: str
    """The attribute for the skip: a module or None, or a flag for an identity skip."""
    without: str | None = ""
    """What None means for the skip: an identity skip (`""`), or no skip (None)."""

    def matches(self, block: nn.Module) -> bool:
        required = [name for name in self.branch.split() if not name.endswith("?")]
        is_flag = self.skip.startswith(("has_", "use_", "apply_"))
        known_skip = hasattr(block, self.skip) and isinstance(getattr(block, self.skip), bool) == is_flag
        return (
            known_skip and has_submodules(block, *required) and not hasattr(block, "routing_fn")
        )  # conditional weights


_FAMILIES = (
    _Family("conv1 convs conv3", "downsample"),  # Res2Net of timm
    _Family("conv1 conv2 conv3 act3", "downsample", None),  # RegNet of timm
    _Family("conv1 conv2", "downsample"),  # SKNet, TResNet and the post-activation ResNetV2 of timm
    _Family("conv1_1x1 conv2_kxk", "shortcut", None),  # byobnet of timm
    _Family("conv1_kxk conv2_kxk", "shortcut", None),
    _Family("conv1_kxk conv2_1x1", "shortcut", None),
    _Family("conv_kxk conv_1x1", "identity", None),  # RepVGG of timm
    _Family("conv_pw conv_dw conv_pwl", "has_skip"),  # EfficientNet and MobileNet of timm
    _Family("conv_dw conv_pw", "has_skip"),
    _Family("conv_exp conv_pwl", "has_skip"),
    _Family("dw_start pw_exp pw_proj", "has_skip"),
    _Family("conv_exp? conv_dw conv_pwl", "use_shortcut"),  # ReXNet of timm
    _Family("block", "use_res_connect"),  # EfficientNet and MobileNetV3 of torchvision
    _Family("conv", "use_res_connect"),  # MobileNetV2 of torchvision
    _Family("layers", "apply_residual"),  # MNASNet of torchvision
    _Family("f", "proj"),  # RegNet of torchvision
    _Family("layer", "shortcut"),  # ResNet and RegNet of transformers
    _Family("expand_1x1 conv_3x3 reduce_1x1", "use_residual"),  # MobileNetV2 of transformers
)


def residual_block(block: nn.Module) -> ResidualBlock | None:
    """Return what is regularized in a block, or None if it has no known structure."""
    if hasattr(block, "downsample"):
        if has_submodules(block, "conv1", "bn1", "conv2", "bn2"):
            if not norms_follow_convs(block):
                return None
            norms = tuple(name for name in ("bn1", "bn2", "bn3") if getattr(block, name, None) is not None)
            return ResidualBlock(norms, _skip_of(block, _Family("conv1", "downsample")), "conv1")
        if has_submodules(block, "norm1", "conv1", "norm2", "conv2") and _starts_with_norm(block):
            return _pre_activation(block)
    for family in _FAMILIES:
        if family.matches(block):
            skip = _skip_of(block, family)
            norms = tuple(conv.norm for conv in conv_blocks(block) if conv.norm and _in_branch(conv.norm, skip))
            first = next(name for name in family.branch.replace("?", "").split() if has_submodules(block, name))
            return ResidualBlock(norms, skip, first) if norms else None
    return None


def _skip_of(block: nn.Module, family: _Family) -> str | None:
    value = getattr(block, family.skip)
    if isinstance(value, nn.Module):
        return family.skip
    if isinstance(value, bool):
        return "" if value else None
    return family.without


def _in_branch(name: str, skip: str | None) -> bool:
    """Whether the layer is on the branch, outside its gates."""
    segments = name.split(".")
    return (not skip or segments[0] != skip) and not set(segments) & set(_GATES)


def _starts_with_norm(block: nn.Module) -> bool:
    names = [name for name, _ in block.named_modules(remove_duplicate=False)]
    return names.index("norm1") < names.index("conv1")


def _pre_activation(block: nn.Module) -> ResidualBlock:
    """A convolution is followed by the norm of the next one; the last is followed by the addition."""
    last = "conv3" if has_submodules(block, "conv3") else "conv2"
    norms = [name for name in ("norm2", "norm3") if has_submodules(block, name)]
    return ResidualBlock((*norms, last), _skip_of(block, _Family("norm1", "downsample")), "norm1")


def last_stages(model: nn.Module) -> list[tuple[Layer, ResidualBlock, float]]:
    """Return the blocks of the last two stages of each CNN in the model, with the fraction of the rate in each.

    The stages of a ResNet are `layer3` and `layer4`. In other CNNs a stage is a run of blocks of one resolution.

    Raises:
        LayerError: one of these stages also has blocks without a known structure.
    """
    found = [(layer, block) for layer in named_layers(model) if (block := residual_block(layer.module)) is not None]
    named = [(layer, block, _RESNET_GROUPS[group]) for layer, block in found if (group := _group(layer.name))]
    if named:
        return named
    chosen = []
    for network in dict.fromkeys(_network(layer.name) for layer, _ in found):
        stages = _stages([(layer, block) for layer, block in found if _network(layer.name) == network])
        if len(stages) > 1:
            _check_all_known(model, network, [layer.name for stage in stages[-2:] for layer, _ in stage])
            chosen += [(*block, 0.25) for block in stages[-2]] + [(*block, 1.0) for block in stages[-1]]
    return chosen


def _group(name: str) -> str:
    """Return "layer3" or "layer4" for the name of a block in this group of a ResNet, otherwise an empty string."""
    group, _, index = name.rpartition(".")
    last = group.rpartition(".")[2]
    return last if index.isdigit() and last in _RESNET_GROUPS else ""


def _network(name: str) -> str:
    """Return the name before its first number: `backbone.stages.` for "backbone.stages.2.blocks.0"."""
    return re.split(r"\d", name, maxsplit=1)[0]


def _stages(blocks: Sequence[tuple[Layer, ResidualBlock]]) -> list[list[tuple[Layer, ResidualBlock]]]:
    """Split the blocks where the resolution changes or, in a dilated network, the dilation."""
    flat = len({_container(layer) for layer, _ in blocks}) == 1  # MobileNets of torchvision
    dilations: dict[str, int] = {}
    for layer, _ in blocks:  # in the first block of a dilated stage, some layers may still have the previous dilation
        run = layer.name if flat else _container(layer)
        dilations[run] = max(dilations.get(run, 1), _largest(layer.module, "dilation"))
    stages: list[list[tuple[Layer, ResidualBlock]]] = []
    before = 1
    for layer, block in blocks:
        dilation = dilations[layer.name if flat else _container(layer)]
        if not stages or dilation > before or _largest(layer.module, "stride") > 1:
            stages.append([])
        stages[-1].append((layer, block))
        before = dilation
    return stages


def _container(layer: Layer) -> str:
    return layer.name.rpartition(".")[0]


def _largest(module: nn.Module, attribute: str) -> int:
    """Return the largest stride or dilation of the layers inside a block."""
    values = [getattr(part, attribute, 1) for part in module.modules()]
    flat = [size for value in values for size in (value if isinstance(value, tuple | list) else (value,))]
    return max((size for size in flat if isinstance(size, int)), default=1)


def _check_all_known(model: nn.Module, network: str, known: Sequence[str]) -> None:
    """Raise if a block or a stage after the first of the `known` blocks was not recognized."""
    layers = {layer.name: layer.module for layer in named_layers(model)}
    around = {name[: dot.start()] for name in known for dot in re.finditer(r"\.", name) if dot.start() >= len(network)}
    flat = {name.rpartition(".")[0] for name in known}
    unknown = []
    for name in [*layers][[*layers].index(known[0]) :]:
        has_known = any(f"{block}.".startswith(f"{name}.") for block in known)
        is_stage = re.fullmatch(re.escape(network) + r"\d+", name) is not None
        parts = layers[name].children() if is_stage else (layers[name],)
        is_inside = name.rpartition(".")[0] in around | flat
        if (is_stage or is_inside) and not has_known and any(map(_has_two_convs, parts)):
            unknown.append(name)
    if unknown:
        raise LayerError(
            f"the recipe recognizes only some blocks of {type(model).__name__}: not {some(unknown)}.\n"
            f"  choose the layers yourself: {_call_for(model, unknown[-1])}"
        )


def _has_two_convs(module: nn.Module) -> bool:
    """Whether this may be a block, and not a single convolution before or after the stages."""
    return sum(isinstance(part, _ConvNd | nn.Linear) for part in module.modules()) > 1


def example_call(model: nn.Module) -> str:
    """Return a call of `inject` with the names of the model's last stage, as an example for an error."""
    layers = named_layers(model)
    convs = [layer.name for layer in layers if isinstance(layer.module, _ConvNd) and not _HEAD.search(layer.name)]
    numbered = [name for name in convs if re.search(r"\d", name)]
    return _call_for(model, numbered[-1]) if numbered else "inject(model, ..., layers=...)"


def _call_for(model: nn.Module, name: str) -> str:
    """Return a call of `inject` for the stage of a layer, which is its name up to the first number."""
    names = {layer.name: layer.module for layer in named_layers(model)}
    stage = re.match(r".*?\d[^.]*", name)[0]  # type: ignore[index]
    pattern = f"{stage}.*" if any(names[stage].children()) else stage
    return f'inject(model, DropBlock(p=0.1), layers=["{pattern}"])'

"""Find convolutions and the norm or activation that follows each, by the order of the layers and not by their names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.conv import _ConvNd

from hookdrop.utils.select import named_layers
from hookdrop.utils.torch_internals import children_of

_POOLS = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)


@dataclass(frozen=True)
class ConvBlock:
    """A convolution, by its full name, and what follows it."""

    conv: str
    norm: str
    """The full name of its norm; empty without one."""
    activated: bool
    """Whether an activation follows."""
    pointwise: bool
    """Whether its kernel has a single element."""


def conv_blocks(model: nn.Module) -> Iterator[ConvBlock]:
    """Yield the convolutions that a norm or an activation follows.

    The layers after a global pooling in a `Sequential` are left out: their maps have one element, or a few.
    """
    pooled: list[str] = []
    for layer in named_layers(model):
        prefix = f"{layer.name}." if layer.name else ""
        if prefix.startswith(tuple(pooled)):
            continue
        children = children_of(layer.module)
        after = _names_after_pooling(layer.module)
        pooled += [f"{prefix}{name}." for name in after]
        yield from _blocks_in({name: part for name, part in children.items() if name not in after}, prefix)


def _names_after_pooling(module: nn.Module) -> list[str]:
    """Return the names of the layers after a global pooling; only in a `Sequential` is the order that of the calls."""
    parts = list(module.named_children()) if isinstance(module, nn.Sequential) else []
    first = next((index for index, (_, part) in enumerate(parts) if isinstance(part, _POOLS)), len(parts))
    return [name for name, _ in parts[first:]]


def _blocks_in(children: Mapping[str, nn.Module | None], prefix: str) -> Iterator[ConvBlock]:
    parts = [(name, part) for name, part in children.items() if part is not None and not _is_transparent(part)]
    parts = [(name, part) for name, part in parts if type(part) not in (nn.ModuleList, nn.ModuleDict)]
    for index, (name, part) in enumerate(parts):
        convs = convs_in(part)
        if not convs:
            continue
        norm, activated = _followers([later for _, later in parts[index + 1 : index + 3]])
        norm_name = parts[index + 1][0] if norm else _numbered_norm(name, children)
        if norm_name or activated:
            pointwise = all(size == 1 for conv in convs for size in conv.kernel_size)
            yield ConvBlock(f"{prefix}{name}", f"{prefix}{norm_name}" if norm_name else "", activated, pointwise)
    yield from _parallel_lists(children, prefix)


def _followers(later: list[nn.Module]) -> tuple[bool, bool]:
    """Whether a norm comes first, and whether an activation comes first or after that norm."""
    if not later:
        return False, False
    if not is_norm(later[0]):
        return False, _is_activation(later[0])
    inside = any(_is_activation(part) for part in later[0].modules())
    return True, inside or (len(later) > 1 and _is_activation(later[1]))


def _numbered_norm(conv: str, children: Mapping[str, nn.Module | None]) -> str:
    """Return norm1 for conv1, in whatever order the block defines them."""
    number = re.fullmatch(r"conv_?(\d+)", conv)
    names = [f"{norm}{number[1]}" for norm in ("norm", "norm_", "bn", "bn_")] if number else []
    return next((name for name in names if children.get(name) is not None), "")


def _parallel_lists(children: Mapping[str, nn.Module | None], prefix: str) -> Iterator[ConvBlock]:
    """Yield the convolutions of Res2Net, whose norms are in a second list."""
    convs, norms = children.get("convs"), children.get("bns")
    if isinstance(convs, nn.ModuleList) and isinstance(norms, nn.ModuleList):
        for index in range(len(convs)):
            yield ConvBlock(f"{prefix}convs.{index}", f"{prefix}bns.{index}", True, False)


def convs_in(module: nn.Module) -> list[_ConvNd]:
    """Return the convolutions of a module that computes nothing else: one, or those of a separable convolution."""
    parts = [part for part in module.modules() if not any(part.children()) and not _is_transparent(part)]
    convs = [part for part in parts if isinstance(part, _ConvNd)]
    return convs if len(convs) == len(parts) else []


def is_norm(module: nn.Module) -> bool:
    """Whether the module is a norm, or wraps one with an activation or a dropout."""
    stateful = [part for part in module.modules() if (part._parameters or part._buffers) and not _is_activation(part)]
    return len(stateful) == 1 and "norm" in type(stateful[0]).__name__.lower()


def _is_activation(module: nn.Module) -> bool:
    """Whether the module is a ReLU, SiLU, GELU or similar. A sigmoid or softmax ends a gate or a model instead."""
    name = type(module).__name__
    return bool(re.search("relu|elu|silu|swish|mish", name, re.IGNORECASE)) and not any(module.children())


def _is_transparent(module: nn.Module) -> bool:
    """Whether the module passes its input on: a dropout, an Identity or an empty container."""
    dropout = isinstance(module, nn.modules.dropout._DropoutNd)
    return dropout or (isinstance(module, nn.Identity | nn.Sequential) and not any(module.children()))

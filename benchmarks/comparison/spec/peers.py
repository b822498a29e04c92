"""The regularizers of torchvision and timm, and the rate at which they drop a given fraction."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import timm.layers
import torch
import torchvision.ops
from torch import nn

import hookdrop
from comparison.spec.errors import suggest

ELEMENTS = 200_000
"""Number of elements per site for measuring a fraction."""
BISECTIONS = 16
PEERS: dict[str, Callable[..., Any]] = {}
"""By the names under which configurations call them."""


class ModelArgument(nn.Identity):
    """Stands for an argument of timm's models that sets a rate."""

    def __init__(self, name: str, p: float) -> None:
        super().__init__()
        self.name, self.p = name, p


def _peer(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def named(make: Callable[..., Any]) -> Callable[..., Any]:
        make.__module__, make.__qualname__ = name.split(".")
        return PEERS.setdefault(name, make)

    return named


@_peer("torchvision.DropBlock2d")
def _torchvision_dropblock(p: float, block_size: int) -> Any:
    return torchvision.ops.DropBlock2d(p, block_size)


@_peer("torchvision.StochasticDepth")
def _torchvision_depth(p: float, mode: str = "row") -> Any:
    return torchvision.ops.StochasticDepth(p, mode)


@_peer("timm.DropBlock2d")
def _timm_dropblock(drop_prob: float, block_size: int = 7, gamma_scale: float = 1.0) -> Any:
    """Each channel has its own mask, as in the paper and in hookdrop's DropBlock."""
    return timm.layers.DropBlock2d(drop_prob, block_size, gamma_scale, couple_channels=False)


@_peer("timm.DropPath")
def _timm_drop_path(drop_prob: float) -> Any:
    return timm.layers.DropPath(drop_prob)


@_peer("timm.drop_path_rate")
def _drop_path_rate(p: float) -> ModelArgument:
    return ModelArgument("drop_path_rate", p)


@_peer("timm.drop_block_rate")
def _drop_block_rate(p: float) -> ModelArgument:
    return ModelArgument("drop_block_rate", p)


@_peer("timm.drop_rate")
def _drop_rate(p: float) -> ModelArgument:
    return ModelArgument("drop_rate", p)


def read_peer(text: str) -> Any:
    """The module or model argument that a text describes; it is never evaluated as code.

    Raises:
        ValueError, TypeError: The peer does not exist, or does not accept these settings.
    """
    name = text.partition("(")[0].strip()
    if name not in PEERS:
        raise ValueError(f"{name!r} is not a peer.\n{suggest(name, PEERS)}")
    made = hookdrop.InjectionSpec.from_dict(
        {"regularizer": text, "layers": "*"}, allow=list(PEERS.values())
    ).regularizer
    rate = getattr(made, rate_name(made))
    if not 0 <= rate <= 1:
        raise ValueError(f"{text}: {rate_name(made)} must be in [0, 1], got {rate}.")
    return made


def rate_name(made: Any) -> str:
    """The attribute that holds the rate of a regularizer, recipe or peer; empty if it has none."""
    if isinstance(made, hookdrop.Regularizer):
        declared = type(made).rate
        return "" if declared is None else declared.attribute
    return next((name for name in ("p", "drop_prob") if hasattr(made, name)), "")


@functools.lru_cache(maxsize=256)
def rate_for(text: str, fraction: float, shapes: Sequence[tuple[int, ...]]) -> float:
    """Find the rate at which a peer drops `fraction` of all elements, by bisection with a fixed seed.

    Args:
        text: The peer, whose own rate is not used.
        fraction: Target fraction of the elements of all sites together, in [0, 1].
        shapes: A tuple of the tensor shape of each site, including the batch dimension.

    Raises:
        ValueError: The peer drops less at any rate.
    """
    low, high = 0.0, 0.99
    if fraction <= 0:
        return 0.0
    module = read_peer(text).train()
    if (most := _dropped(module, high, shapes)) < fraction:
        raise ValueError(f"{text} cannot drop {fraction:g}: it drops only {most:.3f} at rate {high}.")
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if _dropped(module, middle, shapes) < fraction else (low, middle)
    return (low + high) / 2


def _dropped(module: nn.Module, rate: float, shapes: Sequence[tuple[int, ...]]) -> float:
    setattr(module, rate_name(module), rate)
    zeros = elements = 0.0
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for _, *shape in sorted(set(shapes)):
            torch.manual_seed(0)
            size, count = torch.Size(shape).numel(), [one[1:] for one in shapes].count(tuple(shape))
            samples = max(1, ELEMENTS // size)
            part = (module(torch.ones(samples, *shape)) == 0).double().mean().item()
            zeros += part * size * count
            elements += size * count
    return zeros / elements

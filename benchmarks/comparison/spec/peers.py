"""The regularizers of torchvision and timm, and the rate at which one of them really drops a given fraction."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import timm.layers
import torch
import torchvision.ops
from torch import nn

from comparison.spec.call_syntax import Call, read
from comparison.spec.errors import or_nearest

ELEMENTS = 200_000
"""Of each site's shape, that a fraction is measured on."""
HALVINGS = 16


class Peer(NamedTuple):
    """Somebody else's regularizer."""

    make: Callable[..., nn.Module]
    rate_name: str
    settings: tuple[str, ...]
    defaults: dict[str, Any]


PEERS = {
    "torchvision.DropBlock2d": Peer(torchvision.ops.DropBlock2d, "p", ("p", "block_size"), {}),
    "torchvision.StochasticDepth": Peer(torchvision.ops.StochasticDepth, "p", ("p", "mode"), {"mode": "row"}),
    "timm.DropBlock2d": Peer(
        timm.layers.DropBlock2d, "drop_prob", ("drop_prob", "block_size", "gamma_scale"), {"couple_channels": False}
    ),
    "timm.DropPath": Peer(timm.layers.DropPath, "drop_prob", ("drop_prob",), {}),
}
"""`couple_channels=False` as in the paper and in hookdrop's DropBlock: each channel has a mask of its own."""


def peer_of(call: Call) -> Peer:
    """Whose regularizer a call names.

    Raises:
        ValueError: none of those that are known.
    """
    if call.name not in PEERS:
        raise ValueError(f"no peer is called {call.name!r}.\n{or_nearest(call.name, PEERS)}")
    return PEERS[call.name]


def make(call: Call, rate: float) -> nn.Module:
    """The peer's module at a rate.

    Raises:
        ValueError: it does not take these settings.
    """
    peer = peer_of(call)
    takes = [*peer.settings, *peer.defaults]
    if unknown := [name for name in call.kwargs if name not in takes]:
        # timm's own would swallow it.
        raise ValueError(f"{call.name} takes no {unknown[0]!r}: it takes {', '.join(dict.fromkeys(takes))}.")
    try:
        return peer.make(**{**peer.defaults, **call.kwargs, peer.rate_name: rate})
    except TypeError as error:
        raise ValueError(f"{call}: {error}") from None


def rate_for(call: Call, fraction: float, shapes: Sequence[tuple[int, ...]]) -> float:
    """The rate at which the peer drops `fraction` of the elements of all sites, by bisection under one seed.

    Args:
        call: the peer without its rate.
        fraction: of all elements of all sites together, from 0 to 1.
        shapes: of each site's tensor, the samples first.

    Raises:
        ValueError: not even the rate 0.99 drops so much.
    """
    return _rate_for(str(call), fraction, tuple(shape[1:] for shape in shapes))


@functools.lru_cache(maxsize=256)
def _rate_for(text: str, fraction: float, shapes: tuple[tuple[int, ...], ...]) -> float:
    low, high = 0.0, 0.99
    if fraction <= 0:
        return 0.0
    if (most := _dropped(read(text), high, shapes)) < fraction:
        raise ValueError(f"{text} drops {most:.3f} at the rate {high}, and never {fraction:g}.")
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _dropped(read(text), middle, shapes) < fraction else (low, middle)
    return (low + high) / 2


def _dropped(call: Call, rate: float, shapes: tuple[tuple[int, ...], ...]) -> float:
    module = make(call, rate).train()
    zeros = elements = 0.0
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for shape in sorted(set(shapes)):
            torch.manual_seed(0)
            size = torch.Size(shape).numel()
            samples = max(1, ELEMENTS // size)
            part = (module(torch.ones(samples, *shape)) == 0).double().mean().item()
            zeros += part * size * shapes.count(shape)
            elements += size * shapes.count(shape)
    return zeros / elements

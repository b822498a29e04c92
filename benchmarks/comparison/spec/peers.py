"""The regularizers of torchvision and timm, and the rate at which they drop a given fraction."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import timm.layers
import torch
import torchvision.ops
from torch import nn

from comparison.spec.call_syntax import Call, parse_call
from comparison.spec.errors import suggest

ELEMENTS = 200_000
"""Number of elements per site for measuring a fraction."""
BISECTIONS = 16


class Peer(NamedTuple):
    """A regularizer of another library."""

    make: Callable[..., nn.Module] | None
    """None for an argument of timm's models."""
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
    "timm.drop_path_rate": Peer(None, "p", ("p",), {}),
    "timm.drop_block_rate": Peer(None, "p", ("p",), {}),
    "timm.drop_rate": Peer(None, "p", ("p",), {}),
}
"""`couple_channels=False` as in the paper and in hookdrop's DropBlock: each channel has its own mask."""


def peer_of(call: Call) -> Peer:
    """Look up the peer that a call names.

    Raises:
        ValueError: The name is unknown.
    """
    if call.name not in PEERS:
        raise ValueError(f"{call.name!r} is not a peer.\n{suggest(call.name, PEERS)}")
    return PEERS[call.name]


def is_model_argument(text: str) -> bool:
    """Whether this peer is an argument of timm's models, such as `timm.drop_path_rate(p=0.2)`, and not a module."""
    return peer_of(parse_call(text)).make is None


def check_settings(call: Call) -> None:
    """Check the names of the settings; timm ignores unknown ones.

    Raises:
        ValueError: The peer does not accept these settings.
    """
    takes = list(dict.fromkeys([*peer_of(call).settings, *peer_of(call).defaults]))
    if unknown := [name for name in call.kwargs if name not in takes]:
        raise ValueError(f"{call.name} does not accept {unknown[0]!r}; it accepts {', '.join(takes)}.")


def make(call: Call, rate: float) -> nn.Module:
    """Build the peer's module at a rate.

    Raises:
        ValueError: The peer does not accept these settings.
    """
    peer = peer_of(call)
    check_settings(call)
    assert peer.make is not None, f"{call} is an argument of a model"
    try:
        return peer.make(**{**peer.defaults, **call.kwargs, peer.rate_name: rate})
    except TypeError as error:
        raise ValueError(f"{call}: {error}") from None


def rate_for(call: Call, fraction: float, shapes: Sequence[tuple[int, ...]]) -> float:
    """Find the rate at which the peer drops `fraction` of all elements, by bisection with a fixed seed.

    Args:
        call: The peer without its rate.
        fraction: Target fraction of the elements of all sites together, in [0, 1].
        shapes: The tensor shape of each site, including the batch dimension.
    """
    return _rate_for(str(call), fraction, tuple(shape[1:] for shape in shapes))


@functools.lru_cache(maxsize=256)
def _rate_for(text: str, fraction: float, shapes: tuple[tuple[int, ...], ...]) -> float:
    low, high = 0.0, 0.99
    if fraction <= 0:
        return 0.0
    if (most := _dropped(parse_call(text), high, shapes)) < fraction:
        raise ValueError(f"{text} cannot drop {fraction:g}: it drops only {most:.3f} at rate {high}.")
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if _dropped(parse_call(text), middle, shapes) < fraction else (low, middle)
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

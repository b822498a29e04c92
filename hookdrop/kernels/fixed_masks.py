"""The masks of Masksembles, the same in each process. An operator makes them, because exported programs name it."""

from __future__ import annotations

import random
from functools import lru_cache

import torch
from torch import Tensor

from hookdrop.kernels.random_numbers import operator


def ones_per_mask(channels: int, count: int, scale: float) -> int:
    """The number of ones of each of `count` masks that together cover `channels`.

    `count` random masks with m ones among m * scale positions cover m * scale * (1 - (1 - 1 / scale)^count) positions
    on average. This is solved for m and rounded down, as in the authors' code, but the masks can always cover all
    channels.
    """
    ones = int(channels / (scale * (1.0 - (1.0 - 1.0 / scale) ** count)))
    return max(ones, -(-channels // count))


def draw_masks(channels: int, count: int, scale: float, seed: str) -> list[list[bool]]:
    """Return `count` masks of `ones_per_mask` ones, such that some mask has each channel; all sets are equally likely.

    Masks are drawn among more positions than `channels`, and again until they cover that many, which then become the
    channels. The global RNG is not used.
    """
    # Python guarantees that `random()` returns the same numbers in all versions.
    draw = random.Random(f"{seed} {channels} {count} {scale}").random
    ones = ones_per_mask(channels, count, scale)

    def expected_excess(positions: int) -> float:
        return abs(positions * (1.0 - (1.0 - ones / positions) ** count) - channels)

    positions = min(range(channels, 8 * channels), key=expected_excess)
    while True:
        keys = [[draw() for _ in range(positions)] for _ in range(count)]
        masks = [set(sorted(range(positions), key=of_mask.__getitem__)[:ones]) for of_mask in keys]
        covered = sorted(set().union(*masks))
        if len(covered) == channels:
            return [[position in mask for position in covered] for mask in masks]


@lru_cache(maxsize=1024)
def _cached(channels: int, count: int, scale: float, seed: str, device: torch.device) -> Tensor:
    return torch.tensor(draw_masks(channels, count, scale, seed), device=device)


fixed_masks = operator(
    "fixed_masks(SymInt channels, SymInt count, float scale, str seed, *, Device device) -> Tensor",
    # Compiled code may reuse the memory of a result.
    lambda *settings, device: _cached(*settings, device).clone(),
    lambda channels, count, scale, seed, *, device: torch.empty((count, channels), dtype=torch.bool, device=device),
)

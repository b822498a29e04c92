"""The rate of seeds that drops a fraction p of a map in blocks.

Ghiasi, Lin, Le, "DropBlock: A regularization method for convolutional networks", 2018, arXiv:1810.12890. The
paper's formula ignores that blocks overlap; here the rate is solved exactly.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from hookdrop.arguments import one_of

GAMMA = ("exact", "paper")

# Where Newton's method may begin: solved once for a map and a block, so that along a schedule a rate's solution is
# a few steps away. A grid, and not the rate before: the last bit must not depend on which rates came first.
_ANCHORS = 64


def gamma_for(sizes: tuple[int, ...], blocks: tuple[int, ...], p: float, how: str = "exact") -> float:
    """The probability that a place where a whole block fits is a seed.

    Args:
        sizes: the map's edges.
        blocks: the block's edge along each, at most the map's.
        p: the fraction to drop, in [0, 1].
        how: `"exact"` or `"paper"`.

    Example:
        >>> round(gamma_for((14, 14), (7, 7), 0.5) / gamma_for((14, 14), (7, 7), 0.5, "paper"), 2)
        1.68
    """
    one_of(how, "gamma", "DropBlock", GAMMA)
    if p in (0.0, 1.0) or 0 in sizes:
        return p
    if how == "paper":
        area = math.prod(size / (block * (size - block + 1)) for size, block in zip(sizes, blocks, strict=True))
        return min(1.0, p * area)
    return _exact(sizes, blocks, p)


@lru_cache(maxsize=4096)
def _exact(sizes: tuple[int, ...], blocks: tuple[int, ...], p: float) -> float:
    anchor = math.floor(p * _ANCHORS) / _ANCHORS
    start = _exact(sizes, blocks, anchor) if 0 < anchor < p else 0.0
    return _solve(_cover_counts(sizes, blocks), p, start)


def _solve(cover: tuple[tuple[int, int], ...], p: float, start: float) -> float:
    """Solve mean over positions of 1 - (1 - gamma)^n(position) = p by Newton's method.

    The left side is concave and increasing in gamma, so that Newton from below the root stays below it and
    climbs to it: no safeguard is needed. `start` must not lie above the root.
    """
    total = sum(times for _, times in cover)
    gamma = max(start, p * total / sum(n * times for n, times in cover))
    for _ in range(200):
        log_miss = math.log1p(-gamma)
        dropped = -sum(times * math.expm1(n * log_miss) for n, times in cover) / total
        slope = sum(times * n * math.exp((n - 1) * log_miss) for n, times in cover) / total
        better = min(gamma + (p - dropped) / slope, math.nextafter(1.0, 0.0))
        if better <= gamma * (1 + 1e-14):
            break
        gamma = better
    return gamma


@lru_cache(maxsize=1024)
def _cover_counts(sizes: Sequence[int], blocks: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """By how many seeds a position can be covered, and how many positions that is true of."""
    cover = Counter({1: 1})
    for size, block in zip(sizes, blocks, strict=True):
        valid = size - block + 1
        along = Counter(min(i, valid - 1) - max(0, i - block + 1) + 1 for i in range(size))
        product: Counter[int] = Counter()
        for n, times in cover.items():
            for m, more in along.items():
                product[n * m] += times * more
        cover = product
    return tuple(cover.items())

"""The seed rate at which blocks cover an expected fraction p of a map.

The formula of the DropBlock paper (arXiv:1810.12890) ignores overlapping blocks; `gamma_for` is exact.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from hookdrop.utils.validation import one_of

GAMMA = ("exact", "paper")


def gamma_for(sizes: tuple[int, ...], blocks: tuple[int, ...], p: float, how: str = "exact") -> float:
    """Return the probability that a position where a whole block fits is a seed.

    Args:
        sizes: the sizes of the map.
        blocks: the sizes of a block, at most those of the map.
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
    """Solve dropped(gamma) = p starting from a cached solution nearby, so that each rate of a schedule is cheap."""
    cover, nearest = _cover_counts(sizes, blocks), round(p * _ANCHORS) / _ANCHORS
    if not 0.0 < nearest < 1.0:
        return _solve(cover, p, start=p / sum(n * share for n, share in cover))
    gamma, slope, bend = _anchor(sizes, blocks, nearest)
    by = (p - nearest) / slope
    return _solve(cover, p, start=gamma + by - bend / slope * by * by / 2)


# Start from a fixed grid, not from the previous rate: the last bit of gamma must not depend on the order of rates.
_ANCHORS = 128


@lru_cache(maxsize=4096)
def _anchor(sizes: tuple[int, ...], blocks: tuple[int, ...], p: float) -> tuple[float, float, float]:
    """The solution for a rate on the grid, with the first two derivatives of dropped(gamma) there."""
    cover = _cover_counts(sizes, blocks)
    gamma = _solve(cover, p, start=p / sum(n * share for n, share in cover))
    miss = math.log1p(-gamma)
    bend = -sum(share * n * (n - 1) * math.exp((n - 2) * miss) for n, share in cover)
    return gamma, _dropped(cover, gamma)[1], bend


def _solve(cover: tuple[tuple[int, float], ...], p: float, start: float) -> float:
    """Newton's method on dropped(gamma) = p.

    The left side is concave and increasing, so the method converges from below, and a first step from above lands
    below. The only safeguard needed is clamping to the open interval (0, 1).
    """
    gamma = min(max(start, math.ulp(0.0)), _BELOW_ONE)
    for _ in range(200):
        dropped, slope = _dropped(cover, gamma)
        step = (p - dropped) / slope
        gamma = min(max(gamma + step, math.ulp(0.0)), _BELOW_ONE)
        # Each step doubles the number of correct digits, so after such a small step the next would change nothing.
        if abs(step) <= 1e-8 * gamma:
            break
    return gamma


_BELOW_ONE = math.nextafter(1.0, 0.0)


def _dropped(cover: tuple[tuple[int, float], ...], gamma: float) -> tuple[float, float]:
    """Mean over positions of 1 - (1 - gamma)^n(position), and its derivative."""
    miss = math.log1p(-gamma)
    dropped = slope = 0.0
    for n, share in cover:
        hit = -math.expm1(n * miss)
        dropped += share * hit
        slope += share * n * (1.0 - hit)
    return dropped, slope / (1.0 - gamma)


@lru_cache(maxsize=1024)
def _cover_counts(sizes: Sequence[int], blocks: Sequence[int]) -> tuple[tuple[int, float], ...]:
    """Pairs of a number of seeds that can cover a position and the share of positions with that number."""
    cover = Counter({1: 1})
    for size, block in zip(sizes, blocks, strict=True):
        valid = size - block + 1
        along = Counter(min(i, valid - 1) - max(0, i - block + 1) + 1 for i in range(size))
        product: Counter[int] = Counter()
        for n, times in cover.items():
            for m, more in along.items():
                product[n * m] += times * more
        cover = product
    total = sum(cover.values())
    return tuple((n, times / total) for n, times in cover.items())

"""How many images of each class are drawn, and which."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

import torch
from torch import Tensor

ENOUGH = 10**9


def even(available: Sequence[int], size: int, draws: torch.Generator) -> list[int]:
    """`size` images, of each class as many as of any other or one more, or all that there are.

    Which classes have one more is drawn.
    """
    level, extra, able = _levels(available, size)
    counts = [min(have, level) for have in available]
    for i in torch.randperm(len(able), generator=draws)[:extra].tolist():
        counts[able[i]] += 1
    return counts


def even_ways(available: Sequence[int], size: int) -> int:
    """How many sets of `size` images `even` allows; `ENOUGH` stands for it or more."""
    level, extra, able = _levels(available, size)
    ways = [1] + [0] * extra
    for have in (available[i] for i in able):
        less, more = math.comb(have, level), math.comb(have, level + 1)
        ways = [min(ENOUGH, less * ways[k] + (more * ways[k - 1] if k else 0)) for k in range(extra + 1)]
    return ways[extra]


def proportional(available: Sequence[int], size: int) -> list[int]:
    """`size` images with the classes as frequent as they are, but of none the last image.

    `size` is at the most what is there less one image a class.
    """
    total, room = sum(available), [max(0, have - 1) for have in available]
    counts = [min(size * have // total, most) for have, most in zip(available, room, strict=True)]
    while sum(counts) < size:
        able = [c for c, most in enumerate(room) if counts[c] < most]
        counts[max(able, key=lambda c: size * available[c] - counts[c] * total)] += 1
    return counts


def per_class(indices: Tensor, labels_N: Tensor, classes: int) -> list[int]:
    """How many of these images each class has."""
    counts: list[int] = labels_N[indices].bincount(minlength=classes).tolist()
    return counts


def drawn(indices: Tensor, labels_N: Tensor, counts: Sequence[int], draws: torch.Generator) -> Tensor:
    """The indices of `counts` images of each class, drawn from `indices`; in ascending order."""
    shuffled = indices[torch.randperm(len(indices), generator=draws)]
    by_class = shuffled[labels_N[shuffled].argsort(stable=True)]
    of_classes = torch.split(by_class, per_class(indices, labels_N, len(counts)))
    return torch.cat([of_class[:count] for of_class, count in zip(of_classes, counts, strict=True)]).sort().values


def without(indices: Tensor, others: Tensor) -> Tensor:
    """Those indices that are not among the others."""
    return indices[~torch.isin(indices, others)]


def _levels(available: Sequence[int], size: int) -> tuple[int, int, list[int]]:
    """What all classes have that can, how many of them have one more, and which could."""

    def filled(level: int) -> int:
        return sum(min(have, level) for have in available)

    level = bisect_right(range(max(available) + 1), size, key=filled) - 1
    return level, size - filled(level), [c for c, have in enumerate(available) if have > level]

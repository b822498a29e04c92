"""Stratified sampling of images."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import torch
from torch import Tensor


def even(available: Sequence[int], size: int, draws: torch.Generator) -> list[int]:
    """Class counts of a balanced sample of `size` images: equal up to one, limited by the available images.

    The classes with one more image are drawn at random.
    """

    def filled(level: int) -> int:
        return sum(min(have, level) for have in available)

    level = bisect_right(range(max(available) + 1), size, key=filled) - 1
    counts, able = [min(have, level) for have in available], [c for c, have in enumerate(available) if have > level]
    for i in torch.randperm(len(able), generator=draws)[: size - filled(level)].tolist():
        counts[able[i]] += 1
    return counts


def proportional(available: Sequence[int], size: int) -> list[int]:
    """Class counts of a proportional sample of `size` images that leaves at least one image of each class.

    `size` must not exceed the available images minus one per class.
    """
    total, room = sum(available), [max(0, have - 1) for have in available]
    counts = [min(size * have // total, most) for have, most in zip(available, room, strict=True)]
    while sum(counts) < size:
        able = [c for c, most in enumerate(room) if counts[c] < most]
        counts[max(able, key=lambda c: size * available[c] - counts[c] * total)] += 1
    return counts


def per_class(indices: Tensor, labels_N: Tensor, classes: int) -> list[int]:
    """The number of these images in each class."""
    counts: list[int] = labels_N[indices].bincount(minlength=classes).tolist()
    return counts


def drawn(indices: Tensor, labels_N: Tensor, counts: Sequence[int], draws: torch.Generator) -> Tensor:
    """Draw `counts` images of each class from `indices`; returns ascending indices."""
    shuffled = indices[torch.randperm(len(indices), generator=draws)]
    by_class = shuffled[labels_N[shuffled].argsort(stable=True)]
    of_classes = torch.split(by_class, per_class(indices, labels_N, len(counts)))
    return torch.cat([of_class[:count] for of_class, count in zip(of_classes, counts, strict=True)]).sort().values


def without(indices: Tensor, others: Tensor) -> Tensor:
    """The indices that are not in `others`."""
    return indices[~torch.isin(indices, others)]

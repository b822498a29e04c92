"""A dataset with its labels and splits."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from comparison.data.sources import Source
from comparison.spec.run_spec import generator


class DataError(ValueError):
    """The data is not available or cannot be split as requested; the message names the fix."""

    def __init__(self, fact: str, *lines: str) -> None:
        super().__init__("\n".join([fact, *(f"  {line}" for line in lines), "Nothing was trained."]))


class Split(NamedTuple):
    """Disjoint sets of indices in ascending order; validation and test are the same for every seed."""

    train: Tensor
    validation: Tensor
    test: Tensor


@dataclass(frozen=True, eq=False)
class Task:
    """A dataset. Its methods do not affect the global random generators."""

    name: str
    classes: int
    labels_N: Tensor  # of all images, int64
    pool: Tensor  # indices of the images that are not test images
    test: Tensor
    source: Source
    test_sets: Mapping[str, Tensor] = field(default_factory=dict)
    """Test sets with separate results, as bool masks over `test`; empty for a single one."""
    sha256: str = ""  # of the image files, if they were read

    def split(self, train_size: int | None, validation_size: int | None, seed: int) -> Split:
        """Return the seed's training set, balanced over classes, with the shared, stratified validation and test sets.

        Without a size, a fifth of the pool is for validation, and all that remains for training.
        """
        validation = self._validation(validation_size)
        rest = self.pool[~torch.isin(self.pool, validation)]
        if train_size is None:
            return Split(rest, validation, self.test)
        if not self.classes <= train_size <= len(rest):
            raise DataError(
                f"train_size={train_size} is out of range: {self.name!r} has {len(rest):,} images of {self.classes} "
                f"classes besides the test images and {len(validation):,} validation images.",
                f"allowed: {self.classes} (one per class) to {len(rest)}, or none for all",
                *(["or reduce validation_size"] if train_size > len(rest) else []),
            )
        draws = generator(seed, "train")
        counts = _even(per_class(rest, self.labels_N, self.classes), train_size, draws)
        return Split(_drawn(rest, self.labels_N, counts, draws), validation, self.test)

    def _validation(self, size: int | None) -> Tensor:
        available = per_class(self.pool, self.labels_N, self.classes)
        most = sum(max(0, have - 1) for have in available)
        size = len(self.pool) // 5 if size is None else size
        if not 1 <= size <= most:
            raise DataError(
                f"validation_size={size} is out of range: {self.name!r} has {len(self.pool):,} images of "
                f"{self.classes} classes besides the test images.",
                f"allowed: 1 to {most}, which leaves one training image of each class" if most else "add images",
            )
        return _drawn(self.pool, self.labels_N, _proportional(available, size), generator(0, "validation"))


def hold_out(name: str, labels_N: Tensor, classes: Sequence[str], size: int) -> tuple[Tensor, Tensor]:
    """Split a dataset without a test set into a pool and `size` stratified test images, always the same ones."""
    every = torch.arange(len(labels_N))
    available = per_class(every, labels_N, len(classes))
    if min(available) < 2:
        alone = ", ".join(repr(one) for one, have in zip(classes, available, strict=True) if have < 2)
        raise DataError(
            f"{name!r} has only one image of {alone}; training and testing need one each.",
            "add images or remove the class",
        )
    test = _drawn(every, labels_N, _proportional(available, size), generator(0, "test"))
    return every[~torch.isin(every, test)], test


def per_class(indices: Tensor, labels_N: Tensor, classes: int) -> list[int]:
    counts: list[int] = labels_N[indices].bincount(minlength=classes).tolist()
    return counts


def _even(available: Sequence[int], size: int, draws: torch.Generator) -> list[int]:
    """Class counts of a balanced sample: equal up to one, drawn at random, and limited by the available images."""

    def filled(level: int) -> int:
        return sum(min(have, level) for have in available)

    level = bisect_right(range(max(available) + 1), size, key=filled) - 1
    counts, able = [min(have, level) for have in available], [c for c, have in enumerate(available) if have > level]
    for i in torch.randperm(len(able), generator=draws)[: size - filled(level)].tolist():
        counts[able[i]] += 1
    return counts


def _proportional(available: Sequence[int], size: int) -> list[int]:
    """Class counts of a proportional sample that leaves at least one image of each class."""
    total, room = sum(available), [max(0, have - 1) for have in available]
    counts = [min(size * have // total, most) for have, most in zip(available, room, strict=True)]
    while sum(counts) < size:
        able = [c for c, most in enumerate(room) if counts[c] < most]
        counts[max(able, key=lambda c: size * available[c] - counts[c] * total)] += 1
    return counts


def _drawn(indices: Tensor, labels_N: Tensor, counts: Sequence[int], draws: torch.Generator) -> Tensor:
    """Draw `counts` images of each class from `indices`; returns ascending indices."""
    shuffled = indices[torch.randperm(len(indices), generator=draws)]
    by_class = shuffled[labels_N[shuffled].argsort(stable=True)]
    of_classes = torch.split(by_class, per_class(indices, labels_N, len(counts)))
    return torch.cat([of_class[:count] for of_class, count in zip(of_classes, counts, strict=True)]).sort().values

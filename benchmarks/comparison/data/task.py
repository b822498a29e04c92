"""A dataset with its labels and splits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from comparison.data import strata
from comparison.data.sources import Source
from comparison.spec.seeds import generator


class DataError(ValueError):
    """The data is not available or cannot be split as requested; the message names the fix."""

    def __init__(self, fact: str, *lines: str) -> None:
        super().__init__("\n".join([fact, *(f"  {line}" for line in lines), "Nothing was trained."]))


class Split(NamedTuple):
    """Disjoint sets of indices in ascending order."""

    train: Tensor
    validation: Tensor
    """The same for every seed."""
    test: Tensor
    """The same for every seed."""


@dataclass(frozen=True, eq=False)
class Task:
    """A dataset. Its methods do not affect the global random generators."""

    name: str
    classes: int
    labels_N: Tensor
    """Labels of all images, int64."""
    pool: Tensor
    """Indices of the images that are not test images."""
    test: Tensor
    source: Source
    label_noise: float = 0.0
    """Fraction of wrong training labels."""
    skipped: tuple[str, ...] = ()
    """Unreadable files that are skipped."""
    test_sets: Mapping[str, Tensor] = field(default_factory=dict)
    """Test sets with separate results, as bool masks over `test`; empty for a single one."""
    sha256: str = ""
    """SHA-256 of the image files, if they were read."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of an image, (C, H, W)."""
        return self.source.shape

    def split(self, train_size: int | None, validation_size: int | None, seed: int) -> Split:
        """Return the seed's training set with the shared validation and test sets.

        Args:
            train_size: Number of training images, balanced over classes; None uses all images that are not for
                validation.
            validation_size: Number of validation images, stratified; None uses a fifth of the pool.
            seed: Seed of the training set.

        Raises:
            DataError: There are too few images.
        """
        validation = self._validation(validation_size)
        rest = strata.without(self.pool, validation)
        self._check_train_size(train_size, len(rest), len(validation))
        if train_size is None:
            return Split(rest, validation, self.test)
        draws = generator(seed, "train")
        counts = strata.even(strata.per_class(rest, self.labels_N, self.classes), train_size, draws)
        return Split(strata.drawn(rest, self.labels_N, counts, draws), validation, self.test)

    def training_labels(self, indices_B: Tensor, seed: int) -> Tensor:
        """The labels of a training set, with label noise.

        `round(label_noise * len(indices_B))` labels are replaced by another class. The choice depends on the seed and
        the set, not on its order.
        """
        labels_B = self.labels_N[indices_B]
        wrong = round(self.label_noise * len(indices_B))
        draws = generator(seed, "label noise")
        chosen = indices_B.argsort()[torch.randperm(len(indices_B), generator=draws)[:wrong]]
        shift = torch.randint(1, self.classes, (wrong,), generator=draws)
        labels_B[chosen] = (labels_B[chosen] + shift) % self.classes
        return labels_B

    def _validation(self, size: int | None) -> Tensor:
        available = strata.per_class(self.pool, self.labels_N, self.classes)
        most = sum(max(0, have - 1) for have in available)
        size = len(self.pool) // 5 if size is None else size
        if not most:
            raise DataError(
                f"{self.name!r} has only {len(self.pool)} images of {self.classes} classes besides the test images: "
                "none is left for validation.",
                "add images: at least one class needs two",
            )
        if not 1 <= size <= most:
            raise DataError(
                f"validation_size={size} is out of range: {self.name!r} has {len(self.pool):,} images besides the test "
                "images.",
                f"allowed: 1 to {most}, which leaves one training image of each class",
            )
        draws = generator(0, "validation")
        return strata.drawn(self.pool, self.labels_N, strata.proportional(available, size), draws)

    def _check_train_size(self, size: int | None, most: int, validation: int) -> None:
        if size is not None and not self.classes <= size <= most:
            raise DataError(
                f"train_size={size} is out of range: {self.name!r} has {most:,} images of {self.classes} classes "
                f"besides the test images and {validation:,} validation images.",
                f"allowed: {self.classes} (one per class) to {most}, or none for all",
                *(["or reduce validation_size"] if size > most else []),
            )


def hold_out(name: str, labels_N: Tensor, classes: Sequence[str], size: int, *fixes: str) -> tuple[Tensor, Tensor]:
    """Split a dataset without a test set into a pool and `size` stratified test images, always the same ones.

    Raises:
        DataError: A class has fewer than two images; `fixes` are further remedies.
    """
    every = torch.arange(len(labels_N))
    available = strata.per_class(every, labels_N, len(classes))
    if min(available) < 2:
        alone = ", ".join(repr(one) for one, have in zip(classes, available, strict=True) if have < 2)
        raise DataError(
            f"{name!r} has only one image of {alone}; training and testing need one each.",
            "add images or remove the class",
            *fixes,
        )
    test = strata.drawn(every, labels_N, strata.proportional(available, size), generator(0, "test"))
    return strata.without(every, test), test

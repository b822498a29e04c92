"""Images, their labels, and which of them are for training and which for testing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from comparison.data import strata
from comparison.spec.seeds import generator


class DataError(ValueError):
    """Data that can't be had, or that can't be split as asked; its text says what to do."""

    def __init__(self, fact: str, *lines: str) -> None:
        super().__init__("\n".join([fact, *(f"  {line}" for line in lines), "Nothing was trained."]))


class Source(Protocol):
    """Where the pixels of an image come from."""

    def images(self, indices_B: Tensor) -> Tensor:
        """(B, C, H, W), float32, normalised."""
        ...

    def augmented(self, indices_B: Tensor, seed: int, epoch: int) -> Tensor:
        """The same in training form; what is drawn for an image depends on seed, epoch and its index alone."""
        ...


class Split(NamedTuple):
    """Indices in ascending order; no image is in two of them."""

    train: Tensor
    validation: Tensor
    """The same for every seed."""
    test: Tensor
    """The same for every seed."""


@dataclass(frozen=True, eq=False)
class Task:
    """A data set as the comparison sees it. Its methods leave the global random generators alone."""

    name: str
    classes: int
    shape: tuple[int, int, int]
    """(C, H, W) of an image."""
    labels_N: Tensor
    """Of all images, int64."""
    pool: Tensor
    """Indices of the images that are not for testing."""
    test: Tensor
    source: Source
    label_noise: float = 0.0
    """The fraction of a training set's labels that are wrong."""
    skipped: tuple[str, ...] = ()
    """Files that could not be read and are left out."""
    groups: Mapping[str, Tensor] = field(default_factory=dict)
    """Of some data: which images of `test` belong to a group, bool, in the order of `test`."""

    def images(self, indices_B: Tensor) -> Tensor:
        """The images as a model is tested on them: (B, C, H, W), float32, normalised."""
        return self.source.images(indices_B)

    def augmented(self, indices_B: Tensor, seed: int, epoch: int) -> Tensor:
        """The images as a model is trained on them in an epoch; each depends on (seed, epoch, index) alone."""
        return self.source.augmented(indices_B, seed, epoch)

    def split(self, train_size: int | None, validation_size: int | None, seed: int) -> Split:
        """The seed's training set, with the validation and test sets that all seeds share.

        Args:
            train_size: Images, as many of each class (or one more, or all that a class has); all that are not for
                validation if None.
            validation_size: Images, classes as frequent as in the pool; a fifth of the pool if None.
            seed: Of the training set.

        Raises:
            DataError: there are not so many images.
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
        """The labels to train with, of a whole training set, in its order.

        `round(label_noise * len(indices_B))` of them are replaced by another class; which, and by which class,
        depends on the seed and the set, not on its order.
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
                f"{self.name!r} has {len(self.pool)} images of {self.classes} classes that are not for testing: "
                "none can be spared for validation.",
                "add images: at least one class needs two",
            )
        if not 1 <= size <= most:
            raise DataError(
                f"validation_size={size} can't be drawn from the {len(self.pool):,} images of {self.name!r} "
                "that are not for testing.",
                f"allowed: 1 to {most}, so that an image of each class is left to train on",
            )
        draws = generator(0, "validation")
        return strata.drawn(self.pool, self.labels_N, strata.proportional(available, size), draws)

    def _check_train_size(self, size: int | None, most: int, validation: int) -> None:
        if size is not None and not self.classes <= size <= most:
            raise DataError(
                f"train_size={size} can't be drawn from {self.name!r}: {most:,} images of "
                f"{self.classes} classes are neither for testing nor among the {validation:,} for validation.",
                f"allowed: {self.classes} (one a class) to {most}, or none for all",
                *(["a smaller validation_size leaves more"] if size > most else []),
            )

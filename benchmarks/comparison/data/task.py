"""A dataset: its images, in memory or in files, with optional augmentation, its labels and its splits."""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torchvision.datasets.folder import default_loader
from torchvision.transforms import v2

from comparison.spec.run_spec import generator, seed_of

Augmentation = Literal["none", "crop-flip"]
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


class DataError(ValueError):
    """The data is not available or cannot be split as requested; the message names the fix."""

    def __init__(self, fact: str, *lines: str) -> None:
        super().__init__("\n".join([fact, *(f"  {line}" for line in lines), "Nothing was trained."]))


@dataclass(frozen=True, eq=False)
class Source:
    """The images of a dataset. Its methods do not affect the global random generators."""

    read: Callable[[int], Tensor]  # an image in its own size: uint8, or float32, which is used as is
    shape: tuple[int, int, int]  # (C, H, W) of the images
    fit: Any  # the transform to this size
    augment: Any = None  # the transform for training, from an image as it is read; None uses `fit`
    statistics: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())
    """Mean and standard deviation of the channels, for pixels in [0, 1]; for uint8."""

    def images(self, indices_B: Tensor) -> Tensor:
        """Images without augmentation: (B, C, H, W), float32, normalized."""
        return self._normalized(torch.stack([self.fit(self.read(index)) for index in indices_B.tolist()]))

    def augmented(self, indices_B: Tensor, seed: int, epoch: int) -> Tensor:
        """Images with augmentation, which depends only on seed, epoch and the index of each image."""
        if self.augment is None:
            return self.images(indices_B)
        images = []
        with torch.random.fork_rng(devices=[]):
            for index in indices_B.tolist():
                # torch.manual_seed would also seed the GPU generators, which are not restored here.
                torch.default_generator.manual_seed(seed_of(seed, "augmentation", epoch, index))
                images.append(self.augment(self.read(index)))
        return self._normalized(torch.stack(images))

    def _normalized(self, x_BCHW: Tensor) -> Tensor:
        if x_BCHW.dtype != torch.uint8:
            return x_BCHW
        mean, std = map(torch.tensor, self.statistics)
        return (x_BCHW / 255 - mean[:, None, None]) / std[:, None, None]


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


def stored(x_NCHW: Tensor, side: int, augmentation: Augmentation, fill: float = 0.0, **more: Any) -> Source:
    """Images in one tensor, resized to `side`; pixels beyond the edges are `fill`, in the units of the tensor.

    `crop-flip` moves an image by up to an eighth of its side, and flips it or not.
    """
    channels, own = x_NCHW.shape[1:3]
    fit = v2.Identity() if side == own else v2.Resize([side, side], antialias=True)
    moved = [v2.RandomCrop(side, padding=max(1, side // 8), fill=fill), v2.RandomHorizontalFlip()]
    augment = None if augmentation == "none" else v2.Compose([fit, *moved])
    return Source(x_NCHW.__getitem__, (channels, side, side), fit, augment, **more)


def files(paths: tuple[str, ...], side: int, augmentation: Augmentation) -> Source:
    """Images read from their files on every access, resized to the shorter side and center-cropped.

    `crop-flip` is RandomResizedCrop with a horizontal flip.
    """
    fit = v2.Compose([v2.Resize([side], antialias=True), v2.CenterCrop(side)])
    moved = v2.Compose([v2.RandomResizedCrop(side), v2.RandomHorizontalFlip()])
    augment = None if augmentation == "none" else moved

    def read(index: int) -> Tensor:
        x_CHW: Tensor = v2.functional.pil_to_tensor(default_loader(paths[index]))
        return x_CHW

    return Source(read, (3, side, side), fit, augment, IMAGENET)


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

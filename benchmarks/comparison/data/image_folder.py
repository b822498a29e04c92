"""Image datasets with one folder per class: find the files, skip unreadable ones, and split off test images."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

from comparison.data.readable import cache_path, unreadable
from comparison.data.sources import Files
from comparison.data.task import DataError, Task, hold_out
from comparison.spec.run_spec import Data

SIDE = 224
TEST_FRACTION = 0.2
NAMED = 3


@dataclass(frozen=True)
class Found:
    """The readable images below a folder."""

    root: Path
    classes: tuple[str, ...]
    paths: tuple[str, ...]
    labels: tuple[int, ...]
    for_test: tuple[bool, ...] | None
    """None if the folder has no test split."""
    skipped: tuple[str, ...]


def load(data: Data) -> Task:
    """Load `imagefolder:PATH`.

    PATH has either one folder per class, of which a fixed fifth is used for testing, or the splits `train` and `val`
    or `test` with such folders. With both `val` and `test`, the images of `val` are added to those of `train`, because
    validation images are drawn from all images that are not test images. Every image is read once, and the result is
    cached in `data.root`.

    Raises:
        DataError: The folder does not exist, has no images or fewer than two classes, or has an unreadable image with
            `strict`.
    """
    path = Path(data.name.partition(":")[2])
    found = find(path, data.strict, cache_path(path, Path(data.root)))
    labels_N = torch.tensor(found.labels)
    pool, test = _pool_and_test(found, labels_N)
    source = Files(found.paths, data.image_size or SIDE, data.augmentation)
    return Task(
        data.name,
        len(found.classes),
        (3, source.side, source.side),
        labels_N,
        pool,
        test,
        source,
        data.label_noise or 0.0,
        found.skipped,
    )


def _pool_and_test(found: Found, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    every = torch.arange(len(labels_N))
    if found.for_test is not None:
        test = torch.tensor(found.for_test)
        return every[~test], every[test]
    size = max(1, round(TEST_FRACTION * len(every)))
    return hold_out(str(found.root), labels_N, found.classes, size, "or provide your own train/ and val/ folders")


def find(root: Path, strict: bool, cache: Path) -> Found:
    """Find all readable images below `root`. Readability is checked once and stored in `cache`.

    Raises:
        DataError: There is nothing to train on, or an image is unreadable with `strict`.
    """
    if not root.is_dir():
        near = next(folder for folder in root.absolute().parents if folder.is_dir())
        raise DataError(
            f"the folder {str(root)!r} does not exist.",
            f"nearest existing folder: {str(near)!r}, with the subfolders {_some(_folders(near))}",
            "expected: one folder of images per class",
        )
    parts = _parts(root)
    classes = _classes(root, parts)
    numbers = {name: number for number, name in enumerate(classes)}
    samples = [(*sample, test) for part, test in parts for sample in _samples(part, numbers)]
    if not samples:
        raise DataError(
            f"the folders of {str(root)!r} contain no images.", f"supported extensions: {', '.join(IMG_EXTENSIONS)}"
        )
    bad = unreadable([path for path, _, _ in samples], cache)
    _check_readable(root, bad, len(samples), strict)
    skipped = set(bad)
    good = [sample for sample in samples if sample[0] not in skipped]
    _check_all_have_images(root, classes, {(label, test) for _, label, test in good}, [test for _, test in parts])
    paths, labels, tests = zip(*good, strict=True)
    return Found(root, classes, paths, labels, tests if len(parts) > 1 else None, tuple(bad))


def _parts(root: Path) -> list[tuple[Path, bool]]:
    """The folders that contain class folders, and whether each is for testing."""
    train, val, test = (root / name for name in ("train", "val", "test"))
    if not train.is_dir():
        return [(root, False)]
    if test.is_dir():
        return [(part, False) for part in (train, val) if part.is_dir()] + [(test, True)]
    if val.is_dir():
        return [(train, False), (val, True)]
    raise DataError(
        f"{str(root)!r} has train/ but neither val/ nor test/.",
        "add one of them with the same class folders,",
        f"or use {str(train)!r}, which reserves a fifth of its images for testing",
    )


def _classes(root: Path, parts: list[tuple[Path, bool]]) -> tuple[str, ...]:
    names = [tuple(_folders(part)) for part, _ in parts]
    for (part, _), of_part in zip(parts, names, strict=True):
        if set(of_part) != set(names[0]):
            more, less = sorted(set(of_part) - set(names[0])), sorted(set(names[0]) - set(of_part))
            raise DataError(
                f"{part.name}/ and train/ in {str(root)!r} have different classes.",
                *([f"only in {part.name}/: {_some(more)}"] if more else []),
                *([f"only in train/: {_some(less)}"] if less else []),
            )
    if len(names[0]) < 2:
        raise DataError(
            f"{str(parts[0][0])!r} has {f'only one class, {names[0][0]!r}' if names[0] else 'no class folders'}.",
            "expected: one folder of images for each of at least two classes",
        )
    return names[0]


def _folders(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir() if p.is_dir())


def _samples(part: Path, numbers: dict[str, int]) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = make_dataset(str(part), numbers, IMG_EXTENSIONS, allow_empty=True)
    return found


def _check_readable(root: Path, bad: list[str], count: int, strict: bool) -> None:
    if len(bad) == count:
        raise DataError(f"none of the {count} images of {str(root)!r} can be read.", f"for example: {_some(bad)}")
    if bad and strict:
        raise DataError(
            f"{len(bad)} of the {count} images of {str(root)!r} cannot be read: {_some(bad)}",
            "repair or remove them; without strict they are skipped and counted",
        )


def _check_all_have_images(
    root: Path, classes: tuple[str, ...], seen: set[tuple[int, bool]], tests: list[bool]
) -> None:
    for test in sorted(set(tests)):
        bare = [name for label, name in enumerate(classes) if (label, test) not in seen]
        if bare:
            raise DataError(
                f"{str(root)!r} has no readable image of {_some(bare)}"
                f"{(' for testing' if test else ' for training') if len(tests) > 1 else ''}.",
                f"supported extensions: {', '.join(IMG_EXTENSIONS)}",
            )


def _some(names: list[str]) -> str:
    """Quote the first few names."""
    if not names:
        return "(none)"
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(map(repr, names[:NAMED])) + more

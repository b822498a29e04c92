"""Images in folders, a folder for each class: which files there are, which can be read, and which are for testing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

from comparison.data import strata
from comparison.data.readable import notes_of, unreadable
from comparison.data.sources import Files
from comparison.data.task import DataError, Task
from comparison.spec.run_spec import Data
from comparison.spec.seeds import generator

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
    """None if the folder does not say which."""
    skipped: tuple[str, ...]


def load(data: Data) -> Task:
    """The images of `imagefolder:PATH`.

    PATH has either a folder of each class, and a fifth of each class's images is for testing, the same fifth
    always; or `train` and `val` or `test` with folders of the same classes. With both `val` and `test`, the
    images of `val` are added to those of `train`: validation images are drawn from all that are not for testing.
    All images are read once beforehand; which could be read is noted in the folder `data.root`.

    Raises:
        DataError: there is no such folder, there are no images or no two classes, or `strict` and an unreadable image.
    """
    path = Path(data.name.partition(":")[2])
    found = find(path, data.strict, notes_of(path, Path(data.root)))
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
    available = strata.per_class(every, labels_N, len(found.classes))
    if min(available) < 2:
        alone = ", ".join(repr(name) for name, have in zip(found.classes, available, strict=True) if have < 2)
        raise DataError(
            f"{str(found.root)!r} has one image only of {alone}: it can't be both trained on and tested on.",
            "add images, take the class away, or have folders train/ and val/ of your own",
        )
    counts = strata.proportional(available, max(1, round(TEST_FRACTION * len(every))))
    test = strata.drawn(every, labels_N, counts, generator(0, "test"))
    return strata.without(every, test), test


def find(root: Path, strict: bool, notes: Path) -> Found:
    """All images below `root`, each of them read once to see that it can be; what was found is kept in `notes`.

    Raises:
        DataError: there is nothing to train on, or `strict` and an unreadable image.
    """
    if not root.is_dir():
        near = next(folder for folder in root.absolute().parents if folder.is_dir())
        raise DataError(
            f"there is no folder {str(root)!r}.",
            f"the nearest that exists is {str(near)!r}, with the folders {_some(_folders(near))}",
            "it should have a folder of images for each class",
        )
    parts = _parts(root)
    classes = _classes(root, parts)
    numbers = {name: number for number, name in enumerate(classes)}
    samples = [(*sample, test) for part, test in parts for sample in _samples(part, numbers)]
    if not samples:
        raise DataError(
            f"{str(root)!r} has folders, but no image in them.", f"an image ends in {', '.join(IMG_EXTENSIONS)}"
        )
    bad = unreadable([path for path, _, _ in samples], notes)
    _check_readable(root, bad, len(samples), strict)
    left_out = set(bad)
    good = [sample for sample in samples if sample[0] not in left_out]
    _check_all_have_images(root, classes, {(label, test) for _, label, test in good}, [test for _, test in parts])
    paths, labels, tests = zip(*good, strict=True)
    return Found(root, classes, paths, labels, tests if len(parts) > 1 else None, tuple(bad))


def _parts(root: Path) -> list[tuple[Path, bool]]:
    """Folders that have the classes' folders in them, and whether they are for testing."""
    train, val, test = (root / name for name in ("train", "val", "test"))
    if not train.is_dir():
        return [(root, False)]
    if test.is_dir():
        return [(part, False) for part in (train, val) if part.is_dir()] + [(test, True)]
    if val.is_dir():
        return [(train, False), (val, True)]
    raise DataError(
        f"{str(root)!r} has train/, but neither val/ nor test/.",
        "add one of them with the same classes' folders,",
        f"or name {str(train)!r} itself: a fifth of its images is tested on then",
    )


def _classes(root: Path, parts: list[tuple[Path, bool]]) -> tuple[str, ...]:
    names = [tuple(_folders(part)) for part, _ in parts]
    for (part, _), of_part in zip(parts, names, strict=True):
        if set(of_part) != set(names[0]):
            more, less = sorted(set(of_part) - set(names[0])), sorted(set(names[0]) - set(of_part))
            raise DataError(
                f"the classes of {part.name}/ in {str(root)!r} are not those of train/.",
                *([f"only in {part.name}/: {_some(more)}"] if more else []),
                *([f"only in train/: {_some(less)}"] if less else []),
            )
    if len(names[0]) < 2:
        raise DataError(
            f"{str(parts[0][0])!r} has {f'one class only, {names[0][0]!r}' if names[0] else 'no folders of classes'}.",
            "it should have a folder of images for each of at least two classes",
        )
    return names[0]


def _folders(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir() if p.is_dir())


def _samples(part: Path, numbers: dict[str, int]) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = make_dataset(str(part), numbers, IMG_EXTENSIONS, allow_empty=True)
    return found


def _check_readable(root: Path, bad: list[str], count: int, strict: bool) -> None:
    if len(bad) == count:
        raise DataError(f"none of the {count} images of {str(root)!r} can be read.", f"such as {_some(bad)}")
    if bad and strict:
        raise DataError(
            f"{len(bad)} of the {count} images of {str(root)!r} can't be read: {_some(bad)}",
            "mend them or take them away; without strict they are left out and counted",
        )


def _check_all_have_images(
    root: Path, classes: tuple[str, ...], seen: set[tuple[int, bool]], tests: list[bool]
) -> None:
    for test in sorted(set(tests)):
        bare = [name for label, name in enumerate(classes) if (label, test) not in seen]
        if bare:
            raise DataError(
                f"{str(root)!r} has no readable image of {_some(bare)}"
                f"{(' to test on' if test else ' to train on') if len(tests) > 1 else ''}.",
                f"an image ends in {', '.join(IMG_EXTENSIONS)}",
            )


def _some(names: list[str]) -> str:
    """The first few."""
    if not names:
        return "(none)"
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(map(repr, names[:NAMED])) + more

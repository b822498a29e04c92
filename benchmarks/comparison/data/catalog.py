"""Load datasets by name, and check them before training."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable

from comparison.data import cifar, digits, emoji, image_folder, strata, synthetic
from comparison.data.task import DataError, Task
from comparison.spec.run_spec import Data

FOLDER = "imagefolder"
_LOADERS: dict[str, Callable[[Data], Task]] = {
    "digits": digits.load,
    "digits-noisy": digits.load,
    "synthetic-cue": synthetic.load,
    "cifar10": cifar.load,
    "cifar100": cifar.load,
    "emoji": emoji.load,
}
NAMES = (*_LOADERS, f"{FOLDER}:PATH")


def load(data: Data) -> Task:
    """Load a dataset; datasets are cached for the lifetime of the process.

    Raises:
        DataError: The name is unknown, or the data is not available.
    """
    return _load(data.model_copy(update={"train_size": None, "validation_size": None, "workers": 0}))


def check(data: Data, seeds: int) -> list[str]:
    """Check that the data is available and has enough images for all seeds. Return notes for the report.

    Missing CIFAR files are downloaded here, in a single process.

    Raises:
        DataError: The data is not available, or there are too few images.
    """
    return check_seeds(load(data), data.train_size, data.validation_size, seeds)


@functools.lru_cache(maxsize=8)
def _load(data: Data) -> Task:
    kind, _, path = data.name.partition(":")
    if kind == FOLDER and path:
        return image_folder.load(data)
    if kind == FOLDER:
        raise DataError(f"{data.name!r} has no path.", f"use {FOLDER}:PATH")
    if data.name in _LOADERS:
        return _LOADERS[data.name](data)
    near = [NAMES[[*_LOADERS, FOLDER].index(name)] for name in difflib.get_close_matches(kind, [*_LOADERS, FOLDER])]
    raise DataError(
        f"no dataset is named {data.name!r}.",
        *([f"did you mean: {', '.join(map(repr, near))}"] if near else []),
        f"available:    {', '.join(NAMES)}",
    )


def check_seeds(task: Task, train_size: int | None, validation_size: int | None, seeds: int) -> list[str]:
    """Check that each seed can have a different training set. Return notes for the report.

    Each seed draws its balanced training set independently, so there must be at least as many such sets as seeds.
    Training on all images is allowed: the seeds then differ in weights and order, and a note says so. Another note is
    added if the training sets of two seeds share more than half of their images on average.

    Raises:
        DataError: There are fewer such sets than seeds, or a size is out of range.
    """
    split = task.split(train_size, validation_size, 0)
    notes = _skipped_note(task)
    rest = strata.without(task.pool, split.validation)
    if len(split.train) == len(rest):
        shared = "All seeds train on the same images; they differ only in weights, order and augmentation."
        return [*notes, f"{task.name}: {shared}"]
    available = strata.per_class(rest, task.labels_N, task.classes)
    size = len(split.train)
    ways = strata.even_ways(available, size)
    if ways < seeds:
        raise _too_many_seeds(task, available, size, seeds, ways)
    # All images of a class are drawn with the same probability.
    taken = strata.per_class(split.train, task.labels_N, task.classes)
    overlap = sum(n * n / have for n, have in zip(taken, available, strict=True) if have) / size
    if overlap > 0.5:
        notes.append(
            f"{task.name}: the training sets of two seeds share {int(100 * overlap)} % of their images on average."
        )
    return notes


def _skipped_note(task: Task) -> list[str]:
    count = len(task.skipped)
    return [f"{task.name}: skipped {count:,} unreadable image{'s' * (count > 1)}."] if count else []


def _too_many_seeds(task: Task, available: list[int], size: int, seeds: int, ways: int) -> DataError:
    smaller = range(size - 1, task.classes - 1, -1)
    fits = next((n for n in smaller if strata.even_ways(available, n) >= seeds), None)
    return DataError(
        f"{seeds} seeds need different training sets, but there are only {ways} balanced sets of {size} out of the "
        f"{sum(available)} training images of {task.name!r}.",
        f"use at most {ways} seeds",
        *([f"or train_size={fits} or less"] if fits else []),
        "or no train_size: all seeds then train on all images, and differ in weights, order and augmentation",
    )

"""The data of a comparison: `load` it, and `check` beforehand that it is enough."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable

from comparison.data import cifar, digits, image_folder, strata, synthetic
from comparison.data.task import DataError, Task
from comparison.spec.run_spec import Data

FOLDER = "imagefolder"
_LOADERS: dict[str, Callable[[Data], Task]] = {
    "digits": digits.load,
    "digits-noisy": digits.load,
    "synthetic-cue": synthetic.load,
    "cifar10": cifar.load,
    "cifar100": cifar.load,
}
NAMES = (*_LOADERS, f"{FOLDER}:PATH")


def load(data: Data) -> Task:
    """The data; what was loaded once is kept for as long as the process lives.

    Raises:
        DataError: its name is not known, or it can't be had.
    """
    return _load(data.model_copy(update={"train_size": None, "validation_size": None, "workers": 0}))


def check(data: Data, seeds: int) -> list[str]:
    """See that the data can be had and has enough images for so many seeds; what to know about it, in sentences.

    CIFAR is downloaded here, in one process, if it is not there.

    Raises:
        DataError: it can't, or it has not.
    """
    return check_seeds(load(data), data.train_size, data.validation_size, seeds)


@functools.lru_cache(maxsize=8)
def _load(data: Data) -> Task:
    kind, _, path = data.name.partition(":")
    if kind == FOLDER and path:
        return image_folder.load(data)
    if kind == FOLDER:
        raise DataError(f"{data.name!r} does not say which folder.", f"write it as {FOLDER}:PATH")
    if data.name in _LOADERS:
        return _LOADERS[data.name](data)
    near = [NAMES[[*_LOADERS, FOLDER].index(name)] for name in difflib.get_close_matches(kind, [*_LOADERS, FOLDER])]
    raise DataError(
        f"there is no data named {data.name!r}.",
        *([f"did you mean: {', '.join(map(repr, near))}"] if near else []),
        f"there are:    {', '.join(NAMES)}",
    )


def check_seeds(task: Task, train_size: int | None, validation_size: int | None, seeds: int) -> list[str]:
    """See that the training sets of so many seeds can all be different; what to know about them, in sentences.

    The rule: a training set of n images is one of all sets of n images with as many of each class as is possible,
    drawn without regard to other seeds' sets; of such sets there have to be as many as there are seeds. It is no
    error to train on all images: the seeds differ in weights and order then, and a sentence says so. Another one
    says so where training sets of two seeds share more than half of their images.

    Raises:
        DataError: there are fewer such sets than seeds, or a size is out of range.
    """
    split = task.split(train_size, validation_size, 0)
    notes = _left_out(task)
    rest = strata.without(task.pool, split.validation)
    if len(split.train) == len(rest):
        shared = "All seeds train on the same images; they differ in weights, order and augmentation alone."
        return [*notes, f"{task.name}: {shared}"]
    available = strata.per_class(rest, task.labels_N, task.classes)
    size = len(split.train)
    ways = strata.even_ways(available, size)
    if ways < seeds:
        raise _too_many_seeds(task, available, size, seeds, ways)
    # Any image of a class is as likely as any other to be drawn.
    taken = strata.per_class(split.train, task.labels_N, task.classes)
    overlap = sum(n * n / have for n, have in zip(taken, available, strict=True) if have) / size
    if overlap > 0.5:
        notes.append(
            f"{task.name}: the training sets of two seeds share {int(100 * overlap)} % of their images on average."
        )
    return notes


def _left_out(task: Task) -> list[str]:
    count = len(task.skipped)
    return [f"{task.name}: {count:,} unreadable image{'s' * (count > 1)} left out."] if count else []


def _too_many_seeds(task: Task, available: list[int], size: int, seeds: int, ways: int) -> DataError:
    smaller = range(size - 1, task.classes - 1, -1)
    fits = next((n for n in smaller if strata.even_ways(available, n) >= seeds), None)
    return DataError(
        f"{seeds} seeds can't each have a training set of their own: {size} of the {sum(available)} images of "
        f"{task.name!r} that are left for training can be chosen in {ways} ways, as even over classes as they can be.",
        f"at most {ways} seeds",
        *([f"or train_size={fits} at most"] if fits else []),
        "or no train_size: all seeds train on all images then, and differ in weights, order and augmentation",
    )

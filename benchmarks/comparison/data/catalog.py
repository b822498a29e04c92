"""Load datasets by name, and check them before training."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from comparison.data import cifar, digits, emoji, image_folder, synthetic
from comparison.data.task import DataError, Task
from comparison.spec.errors import suggest
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


def load(data: Data) -> Task:
    """Load a dataset; datasets are cached for the lifetime of the process.

    Raises:
        DataError: The name is unknown, or the data is not available.
    """
    return _load(data.model_copy(update={"train_size": None, "validation_size": None, "workers": 0}))


def check(data: Data, seeds: range, batch_size: int) -> list[str]:
    """Check that the data is available, and that each seed has another training set. Return notes for the report.

    Missing CIFAR files are downloaded here, in a single process. Training on all images is allowed: the seeds then
    differ in weights and order, and a note says so.

    Raises:
        DataError: The data is not available, a size is out of range, or two seeds have the same training set.
    """
    task = load(data)
    splits = [task.split(data.train_size, data.validation_size, seed) for seed in seeds]
    count, size = len(task.skipped), len(splits[0].train)
    notes = [f"{task.name}: skipped {count:,} unreadable image{'s' * (count > 1)}."] if count else []
    if size < batch_size:
        notes.append(f"{data.name}: each epoch is a single batch of {size} images (batch_size={batch_size}).")
    if size + len(splits[0].validation) == len(task.pool):
        shared = "All seeds train on the same images; they differ only in weights, order and augmentation."
        return [*notes, f"{task.name}: {shared}"]
    if len({tuple(split.train.tolist()) for split in splits}) < len(seeds):
        raise DataError(
            f"{len(seeds)} seeds need different training sets, but two of them draw the same {size} of the "
            f"{len(task.pool) - len(splits[0].validation)} training images of {task.name!r}.",
            "use fewer seeds or a smaller train_size,",
            "or no train_size: all seeds then train on all images, and differ in weights, order and augmentation",
        )
    overlap = torch.isin(splits[0].train, splits[1].train).double().mean().item()
    if overlap > 0.5:
        notes.append(f"{task.name}: the training sets of two seeds share about {100 * overlap:.0f} % of their images.")
    return notes


@functools.lru_cache(maxsize=8)
def _load(data: Data) -> Task:
    kind, _, path = data.name.partition(":")
    if kind == FOLDER and path:
        return image_folder.load(data)
    if kind == FOLDER:
        raise DataError(f"{data.name!r} has no path.", f"use {FOLDER}:PATH")
    if data.name in _LOADERS:
        return _LOADERS[data.name](data)
    raise DataError(f"no dataset is named {data.name!r}.", *suggest(kind, [*_LOADERS, FOLDER]).strip().splitlines())

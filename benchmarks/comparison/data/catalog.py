"""Load datasets by name, check them before training, and iterate over their batches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import DataLoader
from torchvision import datasets

from comparison.data import emoji, image_folder, synthetic
from comparison.data.sources import stored
from comparison.data.task import DataError, Task
from comparison.spec.run_spec import Data, generator, suggest

FOLDER = "imagefolder"
TEST_DIGITS = 797
_CIFAR: dict[str, tuple[Any, Any]] = {
    "cifar10": (datasets.CIFAR10, ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))),
    "cifar100": (datasets.CIFAR100, ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))),
}
Batch = tuple[Tensor, Tensor, Tensor]
"""(indices_B, x_BCHW, y_B)."""


def load(data: Data) -> Task:
    """Load a dataset; datasets are cached for the lifetime of the process."""
    return _load(data.model_copy(update={"train_size": None, "validation_size": None, "workers": 0}))


@functools.lru_cache(maxsize=8)
def _load(data: Data) -> Task:
    kind, _, path = data.name.partition(":")
    if kind == FOLDER and path:
        return image_folder.load(data)
    if kind == FOLDER:
        raise DataError(f"{data.name!r} has no path.", f"use {FOLDER}:PATH")
    if data.name in LOADERS:
        return LOADERS[data.name](data)
    raise DataError(f"no dataset is named {data.name!r}.", suggest(kind, [*LOADERS, FOLDER]).strip())


def digits(data: Data) -> Task:
    """Load scikit-learn's digits (1,797 of 8x8 pixels), enlarged to 32x32 pixels in [-1, 1]."""
    found = load_digits()
    size = data.image_size or 32
    x_N1HW = torch.tensor(found.images, dtype=torch.float32)[:, None] / 8 - 1
    x_N1HW = interpolate(x_N1HW, size=(size, size), mode="bilinear", align_corners=False)
    every, labels_N = torch.arange(len(x_N1HW)), torch.tensor(found.target, dtype=torch.int64)
    pool, test = train_test_split(every, test_size=TEST_DIGITS, stratify=found.target, random_state=0)
    source = stored(x_N1HW, size, data.augmentation, fill=-1.0)
    return Task(data.name, 10, labels_N, pool.sort().values, test.sort().values, source)


def cifar(data: Data) -> Task:
    """Load CIFAR-10 or CIFAR-100, downloaded if needed: a pool of 50,000 images, and 10,000 for testing."""
    kind, statistics = _CIFAR[data.name]
    try:
        train, test = (kind(data.root, train=part, download=True) for part in (True, False))
    except Exception as error:  # network, disk, archive and pickle errors have no common base class
        how = f"put {kind.url} into {Path(data.root).absolute()} (`root`)"
        raise DataError(f"cannot load or download {data.name!r}: {type(error).__name__}: {error}", how) from error
    x_NCHW = torch.cat([torch.from_numpy(part.data) for part in (train, test)]).permute(0, 3, 1, 2).contiguous()
    source = stored(x_NCHW, data.image_size, data.augmentation, statistics=statistics)
    pool, held = torch.arange(len(x_NCHW)).tensor_split([len(train)])
    labels_N = torch.tensor([*train.targets, *test.targets])
    return Task(data.name, len(train.classes), labels_N, pool, held, source)


LOADERS: dict[str, Callable[[Data], Task]] = {
    "digits": digits,
    "synthetic-cue": synthetic.load,
    "cifar10": cifar,
    "cifar100": cifar,
    "emoji": emoji.load,
}


def check(data: Data, seeds: range) -> list[str]:
    """Check that the data is available, and that each seed has another training set. Return notes for the report.

    Missing CIFAR files are downloaded here, in a single process. Training on all images is allowed: the seeds then
    differ in weights and order, and a note says so.
    """
    task = load(data)
    splits = [task.split(data.train_size, data.validation_size, seed) for seed in seeds]
    count, size = len(task.skipped), len(splits[0].train)
    notes = [f"{task.name}: skipped {count:,} unreadable image{'s' * (count > 1)}."] if count else []
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
    return notes


def loader(
    task: Task, split_train: Tensor, batch_size: int, seed: int, epoch: int, workers: int = 0
) -> DataLoader[Batch]:
    """Iterate over the training images in an order that depends on seed and epoch.

    The last incomplete batch is dropped, unless it is the only one. `workers` does not change a bit of the batches.
    """
    order = torch.randperm(len(split_train), generator=generator(seed, "order", epoch))
    parts = torch.split(split_train[order], batch_size)
    batches = [part for part in parts if len(part) == min(batch_size, len(order))]
    # An item is a batch, so that it does not depend on the worker that loads it. Without its own generator, the loader
    # would draw the workers' seeds from the global one.
    settings: Any = {"num_workers": min(workers, len(batches)), "generator": generator(seed, "workers", epoch)}
    settings |= {"dataset": batches, "collate_fn": partial(_batch, task, seed, epoch)}
    return DataLoader(batch_size=None, **settings)


def _batch(task: Task, seed: int, epoch: int, indices_B: Tensor) -> Batch:
    return indices_B, task.source.augmented(indices_B, seed, epoch), task.labels_N[indices_B]

"""Load datasets by name, check them before training, and iterate over their batches."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor
from torch.nn.functional import interpolate
from torchvision.datasets import ImageFolder

from comparison.data import emoji, synthetic
from comparison.data.task import DataError, Task, files, hold_out, stored
from comparison.spec.run_spec import Data, generator, suggest

FOLDER = "imagefolder"
TEST_DIGITS, TEST_FRACTION = 797, 0.2
Batch = tuple[Tensor, Tensor, Tensor]
"""(indices_B, x_BCHW, y_B)."""


def load(data: Data) -> Task:
    """Load a dataset; datasets are cached for the lifetime of the process."""
    return _load(data.model_copy(update={"train_size": None, "validation_size": None}))


@functools.lru_cache(maxsize=8)
def _load(data: Data) -> Task:
    kind, _, path = data.name.partition(":")
    if kind == FOLDER and path:
        return image_folder(data)
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


def image_folder(data: Data) -> Task:
    """Load `imagefolder:PATH`, a folder with one folder per class; a fixed fifth of the images is for testing."""
    root = Path(data.name.partition(":")[2])
    try:
        # torchvision names folders that do not exist, and classes without images.
        folder = ImageFolder(str(root))
    except OSError as error:
        raise DataError(f"{error}", "expected: one folder of images for each of at least two classes") from None
    if len(folder.classes) < 2:
        raise DataError(f"{str(root)!r} has only one class, {folder.classes[0]!r}.", "expected: at least two classes")
    labels_N, paths = torch.tensor(folder.targets), tuple(path for path, _ in folder.samples)
    pool, test = hold_out(str(root), labels_N, folder.classes, max(1, round(TEST_FRACTION * len(paths))))
    source = files(paths, data.image_size or 224, data.augmentation)
    return Task(data.name, len(folder.classes), labels_N, pool, test, source)


LOADERS: dict[str, Callable[[Data], Task]] = {"digits": digits, "synthetic-cue": synthetic.load, "emoji": emoji.load}


def check(data: Data, seeds: range) -> list[str]:
    """Check that the data is available, and that each seed has another training set. Return notes for the report.

    Training on all images is allowed: the seeds then differ in weights and order, and a note says so.
    """
    task = load(data)
    splits = [task.split(data.train_size, data.validation_size, seed) for seed in seeds]
    size = len(splits[0].train)
    if size + len(splits[0].validation) == len(task.pool):
        shared = "All seeds train on the same images; they differ only in weights, order and augmentation."
        return [f"{task.name}: {shared}"]
    if len({tuple(split.train.tolist()) for split in splits}) < len(seeds):
        raise DataError(
            f"{len(seeds)} seeds need different training sets, but two of them draw the same {size} of the "
            f"{len(task.pool) - len(splits[0].validation)} training images of {task.name!r}.",
            "use fewer seeds or a smaller train_size,",
            "or no train_size: all seeds then train on all images, and differ in weights, order and augmentation",
        )
    return []


def batches(task: Task, split_train: Tensor, batch_size: int, seed: int, epoch: int) -> Iterator[Batch]:
    """Yield the training images in an order that depends on seed and epoch.

    The last incomplete batch is dropped, unless it is the only one.
    """
    order = torch.randperm(len(split_train), generator=generator(seed, "order", epoch))
    for indices_B in torch.split(split_train[order], batch_size):
        if len(indices_B) == min(batch_size, len(order)):
            yield indices_B, task.source.augmented(indices_B, seed, epoch), task.labels_N[indices_B]

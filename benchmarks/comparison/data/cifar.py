"""CIFAR-10 and CIFAR-100 from torchvision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torchvision import datasets

from comparison.data.sources import Stored
from comparison.data.task import DataError, Task
from comparison.spec.run_spec import Data

_SETS: dict[str, Any] = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}
_MEAN = {"cifar10": (0.4914, 0.4822, 0.4465), "cifar100": (0.5071, 0.4865, 0.4409)}
_STD = {"cifar10": (0.2470, 0.2435, 0.2616), "cifar100": (0.2673, 0.2564, 0.2762)}
SIDE = 32


def load(data: Data) -> Task:
    """Load CIFAR, downloading it if needed. The pool is the training set (50,000 images); the test set has 10,000.

    Raises:
        DataError: The files are missing or corrupted, and cannot be downloaded.
    """
    try:
        train, test = (_SETS[data.name](data.root, train=part, download=True) for part in (True, False))
    # Network, disk, archive and pickle errors have no common base class.
    except Exception as error:
        raise _unavailable(data, error) from error
    x_NHWC = torch.cat([torch.from_numpy(part.data) for part in (train, test)])
    size = None if data.image_size in (None, SIDE) else data.image_size
    source = Stored(
        x_NHWC.permute(0, 3, 1, 2).contiguous(),
        data.augmentation,
        size,
        mean=_MEAN[data.name],
        std=_STD[data.name],
    )
    return Task(
        data.name,
        len(train.classes),
        source.shape,
        torch.tensor([*train.targets, *test.targets]),
        torch.arange(len(train)),
        torch.arange(len(train), len(x_NHWC)),
        source,
        data.label_noise or 0.0,
    )


def _unavailable(data: Data, error: Exception) -> DataError:
    kind = _SETS[data.name]
    return DataError(
        f"cannot load or download {data.name!r}: {type(error).__name__}: {error}",
        f"download: {kind.url}",
        f"put it:   into {Path(data.root).absolute()} (`root`), as {kind.filename} or extracted as {kind.base_folder}/",
    )

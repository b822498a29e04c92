"""CIFAR-10 and CIFAR-100 from torchvision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torchvision import datasets

from comparison.data.sources import stored
from comparison.data.task import DataError, Task
from comparison.spec.run_spec import Data

_SETS: dict[str, Any] = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}
_STATISTICS = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}


def load(data: Data) -> Task:
    """Load CIFAR, downloading it if needed. The pool is the training set (50,000 images); the test set has 10,000.

    Raises:
        DataError: The files are missing or corrupted, and cannot be downloaded.
    """
    kind = _SETS[data.name]
    try:
        train, test = (kind(data.root, train=part, download=True) for part in (True, False))
    # Network, disk, archive and pickle errors have no common base class.
    except Exception as error:
        raise DataError(
            f"cannot load or download {data.name!r}: {type(error).__name__}: {error}",
            f"download: {kind.url}",
            f"put it:   into {Path(data.root).absolute()} (`root`), as {kind.filename} or extracted as "
            f"{kind.base_folder}/",
        ) from error
    x_NCHW = torch.cat([torch.from_numpy(part.data) for part in (train, test)]).permute(0, 3, 1, 2).contiguous()
    source = stored(x_NCHW, data.image_size, data.augmentation, statistics=_STATISTICS[data.name])
    labels_N, every = torch.tensor([*train.targets, *test.targets]), torch.arange(len(x_NCHW))
    pool, held = every[: len(train)], every[len(train) :]
    return Task(data.name, len(train.classes), labels_N, pool, held, source, data.label_noise or 0.0)

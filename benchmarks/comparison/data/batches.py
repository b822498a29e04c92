"""Batches of an epoch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from comparison.data.task import Task
from comparison.spec.seeds import generator

Batch = tuple[Tensor, Tensor, Tensor]
"""(indices_B, x_BCHW, y_B)."""


def loader(
    task: Task, split_train: Tensor, batch_size: int, seed: int, epoch: int, labels: Tensor, workers: int = 0
) -> DataLoader[Batch]:
    """Iterate over the training images in an order that depends on seed and epoch.

    The last incomplete batch is dropped, unless it is the only one.

    Args:
        task: The dataset.
        split_train: Indices of the training images.
        batch_size: Images per batch.
        seed: Seed of the order and the augmentation.
        epoch: Epoch of the order and the augmentation.
        labels: Labels of `split_train` in the same order, such as `task.training_labels`.
        workers: Number of data loading processes; the batches are bit-identical for any number.
    """
    order = torch.randperm(len(split_train), generator=generator(seed, "order", epoch))
    batches = [part for part in torch.split(order, batch_size) if len(part) == min(batch_size, len(order))]
    dataset = _Epoch(task, split_train, labels, batches, seed, epoch)
    # Without its own generator, the loader would draw the workers' seeds from the global one.
    own = generator(seed, "workers", epoch)
    return DataLoader(dataset, batch_size=None, num_workers=min(workers, len(batches)), generator=own)


@dataclass(frozen=True, eq=False)
class _Epoch(Dataset[Batch]):
    """A dataset whose items are batches, so that they do not depend on the worker that loads them."""

    task: Task
    indices_N: Tensor
    labels_N: Tensor
    batches: list[Tensor]
    """Positions in `indices_N`."""
    seed: int
    epoch: int

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, i: int) -> Batch:
        indices_B, y_B = self.indices_N[self.batches[i]], self.labels_N[self.batches[i]]
        return indices_B, self.task.source.augmented(indices_B, self.seed, self.epoch), y_B

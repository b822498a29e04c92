"""Batches of an epoch."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterable, Iterator
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
) -> Iterable[Batch]:
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

    Returns:
        An iterable of (indices_B, x_BCHW, y_B).
    """
    order = torch.randperm(len(split_train), generator=generator(seed, "order", epoch))
    batches = [part for part in torch.split(order, batch_size) if len(part) == min(batch_size, len(order))]
    epoch_batches = _Epoch(task, split_train, labels, batches, seed, epoch)
    if not workers:
        return (epoch_batches[i] for i in range(len(batches)))
    return _by_workers(epoch_batches, min(workers, len(batches)))


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
        return indices_B, self.task.augmented(indices_B, self.seed, self.epoch), y_B


def _by_workers(batches: _Epoch, workers: int) -> Iterator[Batch]:
    # Without its own generator, the loader would draw the workers' seeds from the global one.
    own = generator(batches.seed, "workers", batches.epoch)
    processes = DataLoader(batches, batch_size=None, num_workers=workers, generator=own)
    with _allowed_children():
        running = iter(processes)
    yield from running


@contextlib.contextmanager
def _allowed_children() -> Iterator[None]:
    """Let a daemonic process, such as a pool worker, start data loading workers; they exit with it."""
    config = getattr(multiprocessing.current_process(), "_config", {})
    daemon = config.get("daemon")
    config["daemon"] = False
    try:
        yield
    finally:
        config.pop("daemon") if daemon is None else config.update(daemon=daemon)

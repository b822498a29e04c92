"""The batches of an epoch."""

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
    """The training images in an order of the seed's and the epoch's.

    What is left over after the last full batch is not trained on in this epoch, unless there is no full batch.

    Args:
        task: Where the images are.
        split_train: Indices of the training images.
        batch_size: Images a batch.
        seed: Of the order and of the augmentation.
        epoch: Likewise.
        labels: Of the images of `split_train`, in that order; as of `task.training_labels`.
        workers: Processes that read the images; the batches are the same to the last bit for any number.

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
    """Whole batches as the items of a data set: what a worker makes does not depend on which worker it is."""

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
    # Without a generator of its own the loader draws its workers' seeds from the global one.
    own = generator(batches.seed, "workers", batches.epoch)
    processes = DataLoader(batches, batch_size=None, num_workers=workers, generator=own)
    with _allowed_children():
        running = iter(processes)
    yield from running


@contextlib.contextmanager
def _allowed_children() -> Iterator[None]:
    """Let a daemonic process, as those of a pool may be, start workers: they end by themselves when it ends."""
    config = getattr(multiprocessing.current_process(), "_config", {})
    daemon = config.get("daemon")
    config["daemon"] = False
    try:
        yield
    finally:
        config.pop("daemon") if daemon is None else config.update(daemon=daemon)

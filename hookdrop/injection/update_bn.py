"""Collect batch-norm statistics without dropping."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any

import torch
from torch import nn
from torch.optim import swa_utils

from hookdrop.injection.handle import find
from hookdrop.utils.torch_internals import BatchNorm, buffers_of


def update_bn(loader: Iterable[Any], model: nn.Module, device: int | torch.device | None = None) -> None:
    """`torch.optim.swa_utils.update_bn` with all of hookdrop's hooks on the model disabled.

    The batch-norm statistics of a model do not fit the average of its weights. One pass over the data in training mode
    computes new ones. With active hooks, they would be those of dropped activations. Dropout of the model itself stays
    active, as in PyTorch's function.

    Args:
        loader: yields batches: tensors, or lists and tuples whose first element is the input.
        model: the average, such as an `AveragedModel`, or any model.
        device: where to move the inputs; None does not move them.

    Raises:
        ValueError: the loader yields nothing, which would reset the statistics.
        Whatever the loader or the model raises. Statistics, momenta and training modes are then as before.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        >>> _ = inject(model, Dropout(p=0.5), layers="0")
        >>> average = torch.optim.swa_utils.AveragedModel(model)
        >>> update_bn([torch.randn(8, 4)] * 2, average)
        >>> average.module[1].num_batches_tracked
        tensor(2)
    """
    found, batches = find(model), iter(loader)
    first = list(islice(batches, 1))
    if not first:
        raise ValueError(
            f"update_bn: the {type(loader).__name__} yields no batch; the statistics are unchanged.\n"
            "  a generator can be read only once: pass a DataLoader or a list"
        )
    with found.disabled(), _restored_after_error(model):
        swa_utils.update_bn(chain(first, batches), model, device)


@contextmanager
def _restored_after_error(model: nn.Module) -> Iterator[None]:
    """Restore statistics, momenta and training modes if the block raises; PyTorch's function restores nothing."""
    modes = [(module, module.training) for module in model.modules()]
    norms = [(module, module.momentum) for module, _ in modes if isinstance(module, BatchNorm)]
    buffers = [buffer for norm, _ in norms for buffer in buffers_of(norm).values() if buffer is not None]
    values = [buffer.clone() for buffer in buffers]
    try:
        yield
    except BaseException:
        for module, training in modes:
            module.training = training
        for norm, momentum in norms:
            norm.momentum = momentum
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value)
        raise

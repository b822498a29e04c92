"""Averages of models: their batch-norm statistics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import swa_utils

from hookdrop.core.handle import find


def update_bn(loader: Iterable[Any], model: nn.Module, device: int | torch.device | None = None) -> None:
    """`torch.optim.swa_utils.update_bn` with all of hookdrop's hooks on the model disabled.

    Averaged weights need fresh batch-norm statistics. One pass over the data in training mode computes them; with
    active hooks, they would be those of dropped activations. Dropout of the model itself stays active.

    Args:
        loader: yields batches: tensors, or lists and tuples whose first element is the input.
        model: the average, such as an `AveragedModel`, or any model.
        device: where to move the inputs; None does not move them.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        >>> _ = inject(model, Dropout(p=0.5), layers="0")
        >>> average = torch.optim.swa_utils.AveragedModel(model)
        >>> update_bn([torch.randn(8, 4)] * 2, average)
        >>> average.module[1].num_batches_tracked
        tensor(2)
    """
    with find(model).disabled():
        swa_utils.update_bn(loader, model, device)

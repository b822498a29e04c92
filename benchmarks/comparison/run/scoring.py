"""What a model says of images."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from comparison.run.run_setup import Trainee

SCORED_AT_ONCE = 256


def logits_of(trainee: Trainee, indices: Tensor) -> Tensor:
    """What the model says of images, in eval mode, on the CPU: (N, classes), float32."""
    trainee.model.eval()
    with torch.no_grad(), precision(trainee):
        parts = [trainee.model(images_of(trainee, part)).float().cpu() for part in torch.split(indices, SCORED_AT_ONCE)]
    return torch.cat(parts)


def precision(trainee: Trainee) -> Any:
    """The context of the run's forwards."""
    if trainee.run.precision == "float32":
        return nullcontext()
    return torch.autocast(trainee.device.type, torch.bfloat16)


def images_of(trainee: Trainee, indices: Tensor) -> Tensor:
    """In eval form, on the run's device."""
    return trainee.task.images(indices).to(trainee.device)

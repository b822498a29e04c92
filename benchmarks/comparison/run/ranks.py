"""The processes that share one run under torchrun; a run of a single process has one rank."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from comparison.spec.run_spec import Run


def launched_world() -> int:
    """How many processes torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launched_rank() -> int:
    """Which of them this is, from 0."""
    return int(os.environ.get("RANK", "0"))


def rank() -> int:
    """Which of the processes this is, from 0."""
    return distributed.get_rank() if _together() else 0


def device_of(run: Run) -> torch.device:
    """The run's device; on CUDA under torchrun each process has its own."""
    if run.device == "cuda" and run.world > 1:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device(run.device)


def shared(run: Run, model: nn.Module) -> nn.Module:
    """The model whose gradients are averaged over the processes."""
    if run.world == 1:
        return model
    if not _together() or distributed.get_world_size() != run.world:
        raise RuntimeError(f"this run is shared by {run.world} processes, and is not running in so many.")
    return DistributedDataParallel(model)


def agreed(run: Run, value: Any) -> list[Any]:
    """What each process has for a value."""
    if run.world == 1:
        return [value]
    values: list[Any] = [None] * run.world
    distributed.all_gather_object(values, value)
    return values


def _together() -> bool:
    return distributed.is_available() and distributed.is_initialized()

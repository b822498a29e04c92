"""Helpers for runs that several torchrun processes share."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from comparison.spec.run_spec import Run


def launched_world() -> int:
    """Number of processes that torchrun started; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launched_rank() -> int:
    """The rank of this process under torchrun; 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


def rank() -> int:
    """The rank of this process in the process group; 0 without one."""
    return distributed.get_rank() if _in_group() else 0


def device_of(run: Run) -> torch.device:
    """The run's device; with CUDA, each process of a shared run has its own."""
    if run.device == "cuda" and run.world > 1:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device(run.device)


def data_parallel(run: Run, model: nn.Module) -> nn.Module:
    """Wrap the model with DistributedDataParallel if several processes share the run."""
    if run.world == 1:
        return model
    if not _in_group() or distributed.get_world_size() != run.world:
        size = distributed.get_world_size() if _in_group() else 1
        raise RuntimeError(f"this run requires {run.world} processes, but the process group has {size}.")
    return DistributedDataParallel(model)


def gather(run: Run, value: Any) -> list[Any]:
    """The value of each process that shares the run."""
    if run.world == 1:
        return [value]
    values: list[Any] = [None] * run.world
    distributed.all_gather_object(values, value)
    return values


def _in_group() -> bool:
    return distributed.is_available() and distributed.is_initialized()

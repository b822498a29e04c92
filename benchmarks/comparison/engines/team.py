"""Which engine makes the runs; under torchrun, its processes other than the first follow what that one demands."""

from __future__ import annotations

import os
from pathlib import Path

from comparison.engines.base import Engine
from comparison.engines.local import LocalEngine
from comparison.engines.ray import RayEngine
from comparison.engines.torchrun import TorchrunEngine
from comparison.run.training import execute


def chosen(name: str, workers: int, address: str | None) -> Engine:
    """The engine of a name; torchrun's if torchrun started this process.

    Raises:
        EngineError: it can't be had.
    """
    if "RANK" in os.environ:
        return TorchrunEngine()
    return RayEngine(address, workers) if name == "ray" else LocalEngine(workers)


def follow(engine: Engine, scratch: Path) -> int:
    """Take part in the runs that the first process demands, until it demands none."""
    assert isinstance(engine, TorchrunEngine)
    while list(engine.run([], execute, None, scratch)):
        pass
    return 0


def dismiss(engine: Engine) -> None:
    """Let the other processes end."""
    if isinstance(engine, TorchrunEngine):
        list(engine.run([], execute, None, Path()))

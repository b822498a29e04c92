"""Jobs without training for tests of the engines: each succeeds or fails in a specific way."""

from __future__ import annotations

import errno
import os
import resource
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hookdrop
from comparison.engines.base import Beat
from comparison.run.record import Record
from comparison.spec.run_spec import Arm, Data, Model, Run

Job = Callable[[Run, Beat, Path], Record]


def run_of(seed: int, arm: str = "good", **changes: Any) -> Run:
    """A run whose arm's name selects the job."""
    fields = {"data": Data(name="digits"), "model": Model(name="resnet18"), "epochs": 1, "seed": seed}
    return Run(arm=Arm(name=arm, kind="none"), **(fields | changes))


def runs_of(*arms: str, **changes: Any) -> list[Run]:
    return [run_of(seed, arm, **changes) for seed, arm in enumerate(arms)]


def record_of(run: Run, **outcome: Any) -> Record:
    said: Any = {"accuracy": 90.0 + run.seed, "rates": [(0, 0.0)], "pid": os.getpid(), **outcome}
    images = {"correct": np.arange(4) % 2 == 0}
    return Record(run.key, run.model_dump(mode="json"), said, images, seconds=0.1)


def is_first(run: Run, scratch: Path) -> bool:
    """Whether this is the first start of a run."""
    scratch.mkdir(parents=True, exist_ok=True)
    mark = scratch / f"{run.arm.name} {run.seed}"
    first = not mark.exists()
    mark.touch()
    return first


def job(run: Run, beat: Beat, scratch: Path) -> Record:
    """Execute the job that the arm's name selects."""
    arm: Job = globals()[f"_{run.arm.name}"]
    return arm(run, beat, scratch)


def _good(run: Run, beat: Beat, scratch: Path) -> Record:
    for step in range(1, 4):
        beat(step, 3, 1 / step)
    return record_of(run, threads=torch.get_num_threads(), cwd=os.getcwd())


def _slow(run: Run, beat: Beat, scratch: Path) -> Record:
    for step in range(10):
        time.sleep(0.02)
        beat(step + 1, 10, 0.5)
    return record_of(run)


def _held(run: Run, beat: Beat, scratch: Path) -> Record:
    """Run forever at the first start."""
    if is_first(run, scratch):
        (scratch / f"pid {os.getpid()}").touch()
        while True:
            beat(1, 2, 0.5)
            time.sleep(0.02)
    return record_of(run)


def _killed_once(run: Run, beat: Beat, scratch: Path) -> Record:
    if is_first(run, scratch):
        os.kill(os.getpid(), signal.SIGKILL)
    return record_of(run)


def _killed(run: Run, beat: Beat, scratch: Path) -> Record:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def _nan(run: Run, beat: Beat, scratch: Path) -> Record:
    raise FloatingPointError("the loss is nan at step 7")


def _nan_outcome(run: Run, beat: Beat, scratch: Path) -> Record:
    return record_of(run, nll=float("nan"))


def _memory(run: Run, beat: Beat, scratch: Path) -> Record:
    torch.empty(2**60)
    raise AssertionError


def _disk(run: Run, beat: Beat, scratch: Path) -> Record:
    raise OSError(errno.ENOSPC, "No space left on device")


def _mistake(run: Run, beat: Beat, scratch: Path) -> Record:
    return {}["layer9"]  # type: ignore[no-any-return]


def _doubt(run: Run, beat: Beat, scratch: Path) -> Record:
    warnings.warn("the block covers its map", hookdrop.HookdropWarning, stacklevel=1)
    raise AssertionError


def _store_full(run: Run, beat: Beat, scratch: Path) -> Record:
    """Limit the file size, as if the disk were full."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    return record_of(run)

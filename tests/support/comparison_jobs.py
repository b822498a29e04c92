"""Jobs without training for tests of the engines: each succeeds or fails in a specific way."""

import os
import resource
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hookdrop
from comparison.run.record import Record
from comparison.spec.run_spec import Arm, Data, Model, Run

Job = Callable[[Run, Path], Record]


def run_of(seed: int, arm: str = "good", **changes: Any) -> Run:
    """A run whose arm's name selects the job."""
    fields = {"data": Data(name="digits"), "model": Model(name="resnet18"), "epochs": 1, "seed": seed}
    return Run(arm=Arm(name=arm, kind="none"), **(fields | changes))


def runs_of(*arms: str) -> list[Run]:
    return [run_of(seed, arm) for seed, arm in enumerate(arms)]


def record_of(run: Run, **outcome: Any) -> Record:
    said: Any = {"accuracy": 90.0 + run.seed, "rates": [[0, 0.0]], "pid": os.getpid(), **outcome}
    images = {"correct": np.arange(4) % 2 == 0, "nll": np.array([0.25, 2.5], np.float32)}
    return Record(run.key, run.model_dump(mode="json"), said, images, seconds=0.1)


def job(scratch: Path, run: Run) -> Record:
    """Count the start, and execute the job that the arm's name selects."""
    scratch.mkdir(parents=True, exist_ok=True)
    with (scratch / f"starts {run.key}").open("a") as file:
        file.write("x")
    arm: Job = globals()[f"_{run.arm.name}"]
    return arm(run, scratch)


def starts(scratch: Path) -> dict[str, int]:
    """How often each run was started."""
    return {path.name.removeprefix("starts "): len(path.read_text()) for path in scratch.glob("starts *")}


def _good(run: Run, scratch: Path) -> Record:
    return record_of(run, threads=torch.get_num_threads())


def _held(run: Run, scratch: Path) -> Record:
    """Run forever at the first start."""
    if starts(scratch)[run.key] == 1:
        (scratch / f"pid {os.getpid()}").touch()
        signal.pause()
    return record_of(run)


def _killed_once(run: Run, scratch: Path) -> Record:
    if starts(scratch)[run.key] == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return record_of(run)


def _nan(run: Run, scratch: Path) -> Record:
    raise FloatingPointError("the loss is nan at step 7")


def _mistake(run: Run, scratch: Path) -> Record:
    return {}["layer9"]  # type: ignore[no-any-return]


def _doubt(run: Run, scratch: Path) -> Record:
    warnings.warn("the block covers its map", hookdrop.HookdropWarning, stacklevel=1)
    raise AssertionError


def _store_full(run: Run, scratch: Path) -> Record:
    """Limit the file size, as if the disk were full."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    return record_of(run)

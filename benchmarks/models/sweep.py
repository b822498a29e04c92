"""Check one model after another within limits on memory and time, and keep a journal."""

from __future__ import annotations

import argparse
import fcntl
import gc
import json
import os
import signal
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch import nn

import hookdrop
from hookdrop import recipes
from hookdrop.recipes import Recipe
from models import catalog, report
from models.catalog import Name, Trial
from models.check import Check, NotRunnable, short_traceback
from models.sites import BLOCK, P

GIB = 2**30
# For activations, the interpreter and its libraries.
MARGIN = 1.5 * GIB


class Journal:
    """The starts and the records of one shard, one JSON object per line."""

    def __init__(self, out: Path, shard: tuple[int, int]) -> None:
        self.out = out
        self.path = out / f"shard-{shard[0]}-of-{shard[1]}.jsonl"

    def write(self, line: dict[str, Any]) -> None:
        """Append a line and flush it to disk."""
        with self.path.open("a") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def done(self, again: Sequence[str] = ()) -> set[str]:
        """Return the models that a shard in this folder has checked, except those with a status in `again`."""
        return {record["name"] for record in report.records([self.out]) if record["status"] not in again}

    def record_crash(self) -> None:
        """Record a started model without a result as crashed, so that it does not end the next process as well."""
        text = self.path.read_text() if self.path.exists() else ""
        if text and not text.endswith("\n"):  # the process ended while writing
            self.path.write_text(text + "\n")
        lines = report.lines(self.path)
        if lines and "started" in lines[-1]:
            library, _, name = lines[-1]["started"].partition(":")
            crash = {"status": "crashed", "error": "the process ended during the check"}
            self.write(describe(Name(library, name)) | crash)


def describe(name: Name) -> dict[str, Any]:
    """Return the fields that every record starts with."""
    return {"name": str(name), "family": name.family}


def check_model(name: Name, options: argparse.Namespace) -> dict[str, Any]:
    """Check one model and return its record; errors become part of the record."""
    started = time.perf_counter()
    record = describe(name)
    try:
        with warnings.catch_warnings():
            # Warnings of the model libraries. `Check` counts those of hookdrop.
            warnings.simplefilter("ignore")
            record |= _check_model(name, options, record)
    except Exception as error:
        lines = str(error).splitlines() or [""]
        record |= {"status": "failed", "step": "build", "error": f"{type(error).__name__}: {lines[0]}"}
        record["traceback"] = short_traceback()
    gc.collect()
    return record | {"seconds": round(time.perf_counter() - started, 1)}


def _check_model(name: Name, options: argparse.Namespace, record: dict[str, Any]) -> dict[str, Any]:
    skeleton = catalog.skeleton_of(name)
    record["parameters"] = sum(p.numel() for p in skeleton.parameters())
    recipe = getattr(recipes, options.recipe)(p=P, block_size=BLOCK) if options.recipe else None
    trials = (trial for trial in catalog.trials(name, skeleton) if catalog.accepted(trial, skeleton))
    need, (exclusive, shared) = training_bytes(skeleton), limits(options)
    if need > exclusive:
        found = check_first_runnable(trials, "meta", recipe)
        reason = f"needs about {need / GIB:.1f} GiB, the limit is {exclusive / GIB:.1f} GiB"
        return found | ({"status": "meta", "error": reason} if found["status"] == "passed" else {})
    lock = file_lock(options.out / "large.lock") if need > shared else nullcontext()
    with lock, time_limit(options.timeout):
        return check_first_runnable(trials, "cpu", recipe)


def training_bytes(model: nn.Module) -> float:
    """Estimate the memory of a training step without momentum: weights, gradients, buffers and a margin."""
    buffers = sum(x.numel() * x.element_size() for x in model.buffers())
    return buffers + sum(2 * x.numel() * x.element_size() for x in model.parameters()) + MARGIN


def limits(options: argparse.Namespace) -> tuple[float, float]:
    """Return the bytes for a model that runs exclusively, and for one that runs next to those of other shards."""
    memory, count = options.memory * GIB, options.shard[1]
    shared = memory / (2 * count) if count > 1 else memory
    return memory - (count - 1) * shared, shared


def check_first_runnable(trials: Iterator[Trial], device: str, recipe: Recipe | None = None) -> dict[str, Any]:
    """Check the first trial that runs without hookdrop."""
    reason = "the model accepts no input size that was tried"
    for trial in trials:
        if recipe is not None and (refusal := _refusal(recipe, trial)):
            return trial.about() | {"status": "refused", "error": refusal}
        check = Check(trial.build(device), trial.example(device), recipe=recipe)
        try:
            return trial.about() | (check.run() if device == "cpu" else check.run_on_meta())
        except NotRunnable as error:
            reason = f"{error} [{trial.about()['input']}]"
    return {"status": "clean", "error": reason}


def _refusal(recipe: Recipe, trial: Trial) -> str:
    """Return why the recipe refuses a model, which takes no memory to find out."""
    reason = ""
    for example in (trial.example("meta").eval, None):  # a detector runs with values only: then its backbone decides
        try:
            hookdrop.plan(trial.build("meta"), recipe, example_input=example)
        except hookdrop.InjectionError as error:
            reason = str(error).splitlines()[0]
        except hookdrop.LayerError as error:
            return str(error).splitlines()[0]
        except NotImplementedError:  # the constructor needs values
            return ""
        else:
            return ""
    return reason


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock, which the system releases when the process ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise `TimeoutError` after `seconds`."""

    def stop(signum: int, frame: object) -> None:
        raise TimeoutError(f"not finished after {seconds} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)

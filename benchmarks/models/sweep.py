"""One model after another: what a shard has done, and the record of each model within its memory and time."""

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

from models import catalog, report
from models.catalog import Name, Trial
from models.check import Check, NotRunnable, trace

GIB = 2**30
# Beside weights and gradients: activations, the interpreter and its libraries.
MARGIN = 1.5 * GIB


class Journal:
    """What one shard has begun and done, a line each."""

    def __init__(self, out: Path, shard: tuple[int, int]) -> None:
        self.out = out
        self.path = out / f"shard-{shard[0]}-of-{shard[1]}.jsonl"

    def write(self, line: dict[str, Any]) -> None:
        """Append a line, which is on the disk when this returns."""
        with self.path.open("a") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def done(self, again: Sequence[str] = ()) -> set[str]:
        """The models that any shard in this folder has a record of, other than of the statuses in `again`."""
        return {record["name"] for record in report.records([self.out]) if record["status"] not in again}

    def note_crash(self) -> None:
        """Record the model that was begun and not ended: whatever ended the process would end it again."""
        text = self.path.read_text() if self.path.exists() else ""
        if text and not text.endswith("\n"):  # it ended while it wrote
            self.path.write_text(text + "\n")
        lines = report.lines(self.path)
        if lines and "started" in lines[-1]:
            library, _, name = lines[-1]["started"].partition(":")
            self.write(
                describe(Name(library, name)) | {"status": "crashed", "error": "the process ended while it was checked"}
            )


def describe(name: Name) -> dict[str, Any]:
    """The beginning of a record."""
    return {"name": str(name), "family": name.family}


def checked(name: Name, options: argparse.Namespace) -> dict[str, Any]:
    """The record of one model, whatever happens."""
    started = time.perf_counter()
    record = describe(name)
    try:
        with warnings.catch_warnings():
            # Of the libraries; hookdrop's are counted where they may come.
            warnings.simplefilter("ignore")
            record |= _checked(name, options, record)
    except Exception as error:
        lines = str(error).splitlines() or [""]
        record |= {"status": "failed", "step": "elsewhere", "error": f"{type(error).__name__}: {lines[0]}"}
        record["traceback"] = trace()
    gc.collect()
    return record | {"seconds": round(time.perf_counter() - started, 1)}


def _checked(name: Name, options: argparse.Namespace, record: dict[str, Any]) -> dict[str, Any]:
    skeleton = catalog.skeleton_of(name)
    record["parameters"] = sum(p.numel() for p in skeleton.parameters())
    trials = (trial for trial in catalog.trials(name, skeleton) if catalog.accepted(trial, skeleton))
    need, (alone, beside) = bytes_of(skeleton), limits(options)
    if need > alone:
        found = first_that_runs(trials, "meta")
        reason = f"needs about {need / GIB:.1f} GiB, there are {alone / GIB:.1f}"
        return found | ({"status": "meta", "error": reason} if found["status"] == "passed" else {})
    turn = taking_turns(options.out / "large.lock") if need > beside else nullcontext()
    with turn, time_limit(options.timeout):
        return first_that_runs(trials, "cpu")


def bytes_of(model: nn.Module) -> float:
    """What a training step without momentum takes: weights, gradients, buffers and a margin."""
    own = sum(x.numel() * x.element_size() for x in model.buffers())
    return own + sum(2 * x.numel() * x.element_size() for x in model.parameters()) + MARGIN


def limits(options: argparse.Namespace) -> tuple[float, float]:
    """Bytes for the only large model, and for a model beside those of other shards."""
    memory, count = options.memory * GIB, options.shard[1]
    beside = memory / (2 * count) if count > 1 else memory
    return memory - (count - 1) * beside, beside


def first_that_runs(trials: Iterator[Trial], device: str) -> dict[str, Any]:
    """The check on the first input on which the model runs by itself."""
    why = "no input that was tried is accepted"
    for trial in trials:
        check = Check(trial.build(device), trial.example(device))
        try:
            return trial.about() | (check.run() if device == "cpu" else check.run_on_meta())
        except NotRunnable as error:
            why = f"{error} [{trial.about()['input']}]"
    return {"status": "clean", "error": why}


@contextmanager
def taking_turns(path: Path) -> Iterator[None]:
    """One shard at a time; a process that ends gives up its turn."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """`TimeoutError` after so many seconds."""

    def stop(signum: int, frame: object) -> None:
        raise TimeoutError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)

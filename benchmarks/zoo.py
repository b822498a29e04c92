"""Every timm and torchvision architecture, with hooks and without: `python benchmarks/zoo.py`.

Each model is built with random weights for the smallest input that it takes (at least 32 pixels), on real values:
plan, inject DropBlock or what suits the rank at its normalization layers, one training step, and remove. What must be
equal is compared bit for bit (models/check.py). A model that is too large for memory is planned and hooked on the meta
device, and counted apart.

A whole run takes an hour on two cores, in two shards: `--shard 1/2` and `--shard 2/2`, each in a process of its own.
Every model is written down before it is begun and when it is done, so that an interrupted run goes on behind the
model that it was at: start it again with the same `--out`. Each shard that ends writes zoo.json and zoo.md.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import json
import os
import re
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from models import catalog
from models import report as zoo_report
from models.catalog import Name, Trial
from models.check import Check, NotRunnable, trace
from terminal import make_console, say

GIB = 2**30
# Beside weights and gradients: activations, the interpreter and its libraries.
MARGIN = 1.5 * GIB


def main(argv: Sequence[str] | None = None) -> int:
    """Check the models of this shard; 1 if one failed."""
    options = parse_options(argv)
    console = make_console()
    if options.report:
        return conclude(console, options, options.report)
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    journal = Journal(options.out, options.shard)
    if options.fresh:
        journal.path.unlink(missing_ok=True)
    chosen = shard_of(select(options), options.shard)
    journal.note_crash()
    done = journal.done(options.again)
    left = [name for name in chosen if str(name) not in done]
    many = f"{len(chosen)} models in this shard, {len(chosen) - len(left)} of them done"
    say(console, f"{many}; {options.memory:.1f} GiB for all shards")
    for count, name in enumerate(left, 1):
        journal.write({"started": str(name)})
        record = checked(name, options)
        journal.write(record)
        say(console, f"{count}/{len(left)} {in_a_line(record)}")
    return conclude(console, options, [options.out])


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--shard", type=_shard, default=(1, 1), metavar="I/N", help="the I-th of N parts, from 1")
    parser.add_argument(
        "--only",
        type=_expression,
        default="",
        metavar="PATTERN",
        help="names such as timm:resnet18 in which this expression is found",
    )
    parser.add_argument("--library", choices=("timm", "torchvision"))
    parser.add_argument("--limit", type=int, help="at most so many models, before they are sharded")
    parser.add_argument("--memory", type=float, help="GiB for all shards; 3/4 of what is free unless told")
    parser.add_argument("--timeout", type=int, default=900, help="seconds for one model")
    parser.add_argument("--threads", type=int, default=1, help="PyTorch's threads")
    parser.add_argument("--out", type=Path, default=Path("runs/zoo"), help="folder of all that is written; runs/zoo")
    parser.add_argument("--fresh", action="store_true", help="begin this shard anew")
    parser.add_argument("--again", nargs="+", default=(), choices=zoo_report.STATUSES, help="what to check once more")
    parser.add_argument("--report", type=Path, nargs="+", metavar="DIR", help="only write zoo.json and zoo.md of these")
    parser.add_argument("--hardware", default="", help="what to call this machine; its CPU unless told")
    options = parser.parse_args(argv)
    if options.memory is None:
        options.memory = 0.75 * available() / GIB
    if options.threads < 1 or options.timeout < 1 or options.memory <= 0:
        parser.error("--threads and --timeout must be at least 1, --memory more than 0")
    if not options.report and not select(options):
        parser.error(f"no model has {options.only!r} in its name, as in timm:resnet18 or torchvision:resnet18")
    if empty := [str(folder) for folder in options.report or () if not zoo_report.records([folder])]:
        parser.error(f"--report: {', '.join(empty)} holds no results")
    return options


def _expression(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from None
    return text


def _shard(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise argparse.ArgumentTypeError(f"a shard is I/N with I from 1 to N, got {text!r}")
    return int(index), int(count)


def available() -> float:
    """Bytes of memory that are free now; 8 GiB where the system does not tell."""
    info = Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s+(\d+) kB", info.read_text()) if info.exists() else None
    return int(found[1]) * 1024.0 if found else 8.0 * GIB


def select(options: argparse.Namespace) -> list[Name]:
    """The names that were asked for."""
    named = [name for name in catalog.names(options.library) if re.search(options.only, str(name))]
    return named[: options.limit]


def shard_of(names: list[Name], shard: tuple[int, int]) -> list[Name]:
    """Every N-th name: models of one family are alike in size, and lie beside one another."""
    index, count = shard
    return names[index - 1 :: count]


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
        return {record["name"] for record in zoo_report.records([self.out]) if record["status"] not in again}

    def note_crash(self) -> None:
        """Record the model that was begun and not ended: whatever ended the process would end it again."""
        text = self.path.read_text() if self.path.exists() else ""
        if text and not text.endswith("\n"):  # it ended while it wrote
            self.path.write_text(text + "\n")
        lines = zoo_report.lines(self.path)
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


def in_a_line(record: dict[str, Any]) -> str:
    """A record as it is told while running."""
    more = record.get("error") or f"{record.get('input', '')} {record.get('sites', '')}"
    return f"{record['status']:7} {record['name']} {record.get('seconds', 0):.1f} s {more}"


def conclude(console: Console, options: argparse.Namespace, folders: Sequence[Path]) -> int:
    """Write what all shards found so far, and say it in short; 1 if there is a failure."""
    results = zoo_report.merge(folders, catalog.names(), options.hardware)
    zoo_report.write(options.out, results)
    say(console, zoo_report.in_short(results))
    say(console, f"All of it: {options.out / 'zoo.md'} and zoo.json")
    return 1 if any(record["status"] in zoo_report.BAD for record in results["models"]) else 0


if __name__ == "__main__":
    sys.exit(main())

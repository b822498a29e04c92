"""Run a list of named cases in child processes, with limits, and write a report of their records.

A case is a name and a function that returns a record: a dict with `status`, one of `report.STATUSES`. Each record is
a line of a journal. To resume an interrupted run, start it again with the same `--out`, and it skips what the journal
has. A case that ends its process is recorded as crashed, and one that exceeds `--timeout` as not run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import resource
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import TimeoutError, as_completed
from pathlib import Path
from typing import Any

import torch
from pebble import ProcessExpired, ProcessPool

import report
from models.check import CheckFailed, NotRunnable
from terminal import make_console, say

GIB = 2**30
LIBRARIES = 4.0
"""GiB of address space that PyTorch and its libraries take, besides the models."""

Record = dict[str, Any]
Check = Callable[[str, argparse.Namespace], Record]


def parser(
    description: str | None, out: str, memory: float | None = None, timeout: int = 900
) -> argparse.ArgumentParser:
    """Create a parser with the options that all sweeps have."""
    found = argparse.ArgumentParser(description=(description or "").partition(":")[0])
    found.add_argument("--only", type=_regular_expression, default="", metavar="PATTERN", help="to search in names")
    found.add_argument("--shard", type=_shard, default=(1, 1), metavar="I/N", help="check part I of N; I starts at 1")
    found.add_argument(
        "--workers", type=int, default=1, help="child processes (default: 1); 0: this process, no limits"
    )
    found.add_argument("--memory", type=float, default=memory, help="GiB per worker (default: %(default)s)")
    found.add_argument("--timeout", type=int, default=timeout, help="seconds per name (default: %(default)s)")
    found.add_argument("--out", type=Path, default=Path(out), help="output folder (default: %(default)s)")
    found.add_argument("--again", nargs="+", default=(), choices=report.STATUSES, help="statuses to check again")
    found.add_argument(
        "--report", type=Path, nargs="+", metavar="PATH", help="only merge these folders or JSON reports"
    )
    found.add_argument("--hardware", default="", help="machine name in the report (default: its CPU)")
    return found


def _regular_expression(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from None
    return text


def _shard(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise argparse.ArgumentTypeError(f"expected I/N with 1 <= I <= N, got {text!r}")
    return int(index), int(count)


def main(options: argparse.Namespace, sweep: report.Sweep, names: Sequence[str], check: Check) -> int:
    """Check the names of this shard that have no record, and write the report; return 1 if one failed or crashed."""
    console = make_console()
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.report:
        index, count = options.shard
        selected = [name for name in names if re.search(options.only, name)][index - 1 :: count]
        if not selected:
            sys.exit(f"no name matches {options.only!r}; names look like {names[0]!r}")
        done = {one["name"] for one in report.records([options.out], sweep.name) if one["status"] not in options.again}
        pending = [name for name in selected if name not in done]
        say(console, f"{len(selected)} names, {len(selected) - len(pending)} done; {options.memory:.1f} GiB per worker")
        with (options.out / f"{sweep.name}-{index}-of-{count}.jsonl").open("a") as journal:
            journal.write("\n")  # ends half a line that a killed process left
            for number, record in enumerate(run(pending, check, options), 1):
                journal.write(json.dumps(record, allow_nan=False) + "\n")
                journal.flush()
                say(console, f"{number}/{len(pending)} {record['status']:8} {record['name']} {record.get('error', '')}")
    results = report.merge(sweep, options.report or [options.out], names, options.hardware)
    report.write(options.out, sweep, results)
    say(console, f"{report.summary(sweep, results)}\n\nFull report: {options.out / sweep.name}.md and .json")
    return int(any(record["status"] in report.FAILURES for record in results["models"]))


def run(names: Sequence[str], check: Check, options: argparse.Namespace) -> Iterator[Record]:
    """Yield the record of each name, as soon as it is known."""
    if not options.workers:
        yield from (_checked(check, name, options) for name in names)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPool(options.workers, initializer=_prepare, initargs=(options.memory,), context=spawn) as pool:
        waiting = {pool.schedule(_checked, (check, name, options), timeout=options.timeout): name for name in names}
        try:
            for future in as_completed(waiting):
                yield _result(future, waiting[future], options.timeout)
        finally:
            pool.stop()


def _result(future: Any, name: str, timeout: int) -> Record:
    try:
        found: Record = future.result()
    except TimeoutError:
        return {"name": name, "status": "not run", "error": f"not finished after {timeout} s"}
    except ProcessExpired as error:
        return {"name": name, "status": "crashed", "error": f"the process ended with exit status {error.exitcode}"}
    return found


def _prepare(memory: float) -> None:
    """Limit the memory and the threads of a worker, and keep libraries from downloading."""
    limit = int((memory + LIBRARIES) * GIB)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"


def _checked(check: Check, name: str, options: argparse.Namespace) -> Record:
    """Check one name and return its record; errors become part of it."""
    started = time.perf_counter()
    record: Record = {"name": name}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of the model libraries; `Check` counts those of hookdrop
            record |= check(name, options)
    except NotRunnable as error:
        record |= {"status": "not run", "error": str(error)}
    except Exception as error:
        text = str(error) if isinstance(error, CheckFailed) else f"{type(error).__name__}: {error}"
        record |= {"status": "failed", "error": " ".join(text.split())[:300], "traceback": _short_traceback()}
    return record | {"seconds": round(time.perf_counter() - started, 1)}


def _short_traceback() -> str:
    return re.sub(r'File ".*?((?:[^/"]+/){0,3}[^/"]+)"', r'File "\1"', traceback.format_exc())

"""Run a list of named cases in child processes, with limits, and write a report of their records.

A case is a name and a function that returns a record: a dict with `status`, one of `STATUSES`. Each record is a line
of a journal. An interrupted run, started again with the same `--out`, skips what the journals there have, also those of
other machines. A case that ends its process is recorded as crashed, and one that exceeds `--timeout` as not run.
"""

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
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import TimeoutError, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jinja2 import Environment, FileSystemLoader
from pebble import ProcessExpired, ProcessPool

from models.check import CheckFailed, NotRunnable
from program import machine_info

STATUSES = {
    "passed": "all checks passed",
    "batch": 'all checks passed with `mode="batch"`; the default skips layers with a warning, or raises an error',
    "partial": "the sites are right; the recipe warns that it skips other layers",
    "meta": "too large for the memory limit: checked on the meta device only, without values",
    "differs": "the library's own sites or rates, or an independent count, are others; no warning says so",
    "refused": "the recipe raises an error",
    "failed": "a check failed",
    "crashed": "the process ended",
    "no layers": "no layer mixes tokens, or none drops in the library's own model",
    "not built": "the tiny config gives no model",
    "not run": "not finished in time, or no inputs found that run and train the model without hooks",
}
COVERED, FAILURES = ("passed", "batch"), ("failed", "crashed")
NOT_COUNTED = ("no layers", "not built", "not run")
GIB = 2**30
LIBRARIES = 4.0
"""GiB of address space that PyTorch and its libraries take, besides the models."""

Record = dict[str, Any]
Check = Callable[[str, argparse.Namespace], Record]


@dataclass(frozen=True)
class Sweep:
    """What a sweep is about: the name of its files, the title of its page, its command, and what it checks."""

    name: str
    title: str
    command: str
    about: str = ""
    recipe: str = ""
    rules: tuple[str, ...] = ()


def parser(about: str | None, out: str, memory: float | None = None, timeout: int = 900) -> argparse.ArgumentParser:
    """Create a parser with the options that all sweeps have."""
    found = argparse.ArgumentParser(description=(about or "").partition(":")[0])
    add = found.add_argument
    add("--only", default="", metavar="PATTERN", help="a regular expression to search in names")
    add("--workers", type=int, default=1, help="child processes (default: 1); 0: this process, no limits")
    add("--memory", type=float, default=memory, help="GiB per worker (default: %(default)s)")
    add("--timeout", type=int, default=timeout, help="seconds per name (default: %(default)s)")
    add("--out", type=Path, default=Path(out), help="output folder (default: %(default)s)")
    add("--again", nargs="+", default=(), choices=STATUSES, help="statuses to check again")
    return found


def main(options: argparse.Namespace, sweep: Sweep, names: Sequence[str], check: Check) -> int:
    """Check the names that have no record, and write the report; return 1 if one failed or crashed."""
    options.out.mkdir(parents=True, exist_ok=True)
    selected = [name for name in names if re.search(options.only, name)]
    if not selected:
        sys.exit(f"no name matches {options.only!r}; names look like {names[0]!r}")
    done = {one["name"] for one in records(options.out, sweep.name) if one["status"] not in options.again}
    pending = [name for name in selected if name not in done]
    print(f"{len(selected)} names, {len(selected) - len(pending)} done; {options.memory:.1f} GiB per worker")
    with (options.out / f"{sweep.name}-1-of-1.jsonl").open("a") as journal:
        journal.write("\n")  # ends half a line that a killed process left
        for number, record in enumerate(run(pending, check, options), 1):
            journal.write(json.dumps(record, allow_nan=False) + "\n")
            journal.flush()
            print(f"{number}/{len(pending)}", record["status"], record["name"], record.get("error", ""), flush=True)
    results = collect(options.out, sweep, names)
    write(options.out, sweep, results)
    print(f"{summary(results)}\n\nFull report: {options.out / sweep.name}.md and .json")
    return int(any(record["status"] in FAILURES for record in results["models"]))


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
                name, error = waiting[future], future.exception()
                if isinstance(error, TimeoutError):
                    yield {"name": name, "status": "not run", "error": f"not finished after {options.timeout} s"}
                elif isinstance(error, ProcessExpired):
                    reason = f"the process ended with exit status {error.exitcode}"
                    yield {"name": name, "status": "crashed", "error": reason}
                else:
                    yield future.result()
        finally:
            pool.stop()


def _prepare(memory: float) -> None:
    """Limit the memory and the threads of a worker, and keep libraries from downloading."""
    limit = int((memory + LIBRARIES) * GIB)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"


def _checked(check: Check, name: str, options: argparse.Namespace) -> Record:
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
        lines = re.sub(r'File ".*?((?:[^/"]+/){0,3}[^/"]+)"', r'File "\1"', traceback.format_exc())
        record |= {"status": "failed", "error": " ".join(text.split())[:300], "traceback": lines}
    return record | {"seconds": round(time.perf_counter() - started, 1)}


def records(path: Path, name: str) -> list[Record]:
    """Return the last record of each model in the journals of a folder."""
    found: dict[str, Record] = {}
    for text in (text for file in sorted(path.glob(f"{name}-*.jsonl")) for text in file.read_text().splitlines()):
        with suppress(json.JSONDecodeError):  # a process that ended while writing leaves half a line
            one = json.loads(text)
            found[one["name"]] = one
    return list(found.values())


def collect(path: Path, sweep: Sweep, names: Sequence[str]) -> dict[str, Any]:
    """Collect the records of a folder in the order of `names`, with totals and versions."""
    order = {name: index for index, name in enumerate(names)}
    found = sorted(records(path, sweep.name), key=lambda record: order.get(record["name"], len(order)))
    machine = machine_info()
    needing = {rule: {one["family"] for one in found if rule in one.get("rules", ())} for rule in sweep.rules}
    return {
        **({"recipe": sweep.recipe} if sweep.recipe else {}),
        "hardware": machine["cpu"],
        "versions": {"python": machine["python"], **machine["versions"]},
        "kernel": machine["kernel"],
        "totals": totals(found),
        **({"rules": {rule: sorted(families) for rule, families in needing.items()}} if needing else {}),
        "models": [{key: value for key, value in one.items() if key != "traceback"} for one in found],
    }


def totals(found: Sequence[Record]) -> dict[str, int]:
    statuses = [record["status"] for record in found]
    return {status: statuses.count(status) for status in STATUSES}


def coverage(counts: dict[str, int]) -> tuple[int, int]:
    """Return the number of models that passed, and of those that were built and ran without hooks."""
    return sum(counts[status] for status in COVERED), sum(counts[status] for status in set(counts) - {*NOT_COUNTED})


def write(out: Path, sweep: Sweep, results: dict[str, Any]) -> None:
    """Write the JSON file, with one line for each model, and the page."""
    head = json.dumps({**results, "models": []}, indent=1, allow_nan=False).removesuffix("[]\n}")
    rows = ",\n  ".join(json.dumps(record, allow_nan=False) for record in results["models"])
    (out / f"{sweep.name}.json").write_text(f"{head}[\n  {rows}\n ]\n}}\n")
    (out / f"{sweep.name}.md").write_text(markdown(sweep, results))


def summary(results: dict[str, Any]) -> str:
    """Summarize the coverage, in one line for each library."""
    of_library: dict[str, list[Record]] = {}
    for record in results["models"]:
        library, colon, _ = record["name"].partition(":")
        of_library.setdefault(f"{library}: " if colon else "", []).append(record)
    lines = []
    for library, found in of_library.items():
        counts = totals(found)
        covered, counted = coverage(counts)
        others = [f"{count:,} {status}" for status, count in counts.items() if count and status not in COVERED]
        text = f"{library}{covered:,} of {counted:,} models ({covered / max(counted, 1):.1%}) passed"
        lines.append("; ".join([text, *others]) + ".")
    return "\n\n".join(lines)


def markdown(sweep: Sweep, results: dict[str, Any]) -> str:
    """Format the page: sweep.md.j2 with what the records have in common."""
    found = results["models"]
    sites = sum((Counter(one["sites"]) for one in found if isinstance(one.get("sites"), dict)), Counter[str]())
    trained = [one for one in found if "dropped" in one]
    elements = sum(one["elements"] for one in trained)
    shown, families = _families([one for one in found if "family" in one and "rules" not in results])
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), trim_blocks=True)
    text = environment.get_template("sweep.md.j2").render(
        {"rules": {}, **results},
        **{key: Counter(kind for one in found for kind in set(one.get(key, ()))) for key in ("warnings", "problems")},
        **{key: sum(one[key] * one["elements"] for one in trained) / max(elements, 1) for key in ("dropped", "asked")},
        sweep=sweep,
        summary=summary(results),
        sites=sites,
        trained=len(trained),
        elements=elements,
        not_finite=sum(record.get("finite") is False for record in found),
        statuses=STATUSES,
        shown=shown,
        families=families,
    )
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _families(found: Sequence[Record]) -> tuple[list[str], list[list[object]]]:
    """Return the number of models of each status by family; those of torchvision have a dot in their names."""
    if not found:
        return [], []
    table = pd.DataFrame(found)
    counts = pd.crosstab(table["family"], table["status"], margins=True, margins_name="models").drop("models")
    shown = ["models", *(status for status in STATUSES if status in counts)]
    families = sorted(counts.index, key=lambda family: ("." in family, family))
    return shown, [[one, *counts.loc[one, shown]] for one in families]

"""Check a recipe in every family of transformers: `python benchmarks/transformers_zoo.py`.

Build a tiny model of each family with random weights, find inputs that call all of its layers, inject the recipe, run
one training step, and remove the hooks (families/check.py). families/depth.py and families/units.py check what each
site means, such as the end of a residual branch. Nothing is downloaded.

A run takes about ten minutes on two cores with two shards, `--shard 1/2` and `--shard 2/2`, each in its own process. To
resume an interrupted run, start it again with the same `--out`. Each shard writes RECIPE.json and RECIPE.md at its end.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers

from families import report, tiny
from families.layers import attentions, find_runs, stacks
from families.recipes import CASES, run_case
from models.check import CheckFailed, NotRunnable
from models.report import lines, records
from models.sweep import GIB, Journal, time_limit
from terminal import make_console, say
from zoo import _regular_expression, _shard

_STUBS = {"mra": "without its CUDA kernel, the attention returns zeros"}
"""Families that do not compute anything meaningful on a CPU."""


def main(argv: Sequence[str] | None = None) -> int:
    """Check the families of this shard; return 1 if one failed or crashed."""
    options = parse_options(argv)
    console = make_console()
    if not options.report:
        prepare(options)
        journal = FamilyJournal(options.out, options.shard)
        journal.record_crash()
        selected = [name for name in tiny.names() if re.search(options.only, name)][
            options.shard[0] - 1 :: options.shard[1]
        ]
        done = journal.done(options.again)
        pending = [name for name in selected if name not in done]
        say(console, f"{len(selected)} families in this shard, {len(selected) - len(pending)} done")
        for count, name in enumerate(pending, 1):
            journal.write({"started": name})
            record = check_family(name, options)
            journal.write(record)
            say(console, f"{count}/{len(pending)} {record['status']:10} {name} {record.get('error', '')}")
    results = report.merge(records(options.report or [options.out]), options.recipe, options.hardware)
    report.write(options.out, results)
    say(console, report.summary(results))
    return 1 if results["totals"]["failed"] + results["totals"]["crashed"] else 0


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--recipe", choices=CASES, default="stochastic_depth")
    parser.add_argument("--shard", type=_shard, default=(1, 1), metavar="I/N", help="check part I of N; I starts at 1")
    parser.add_argument("--only", type=_regular_expression, default="", metavar="PATTERN", help="to search in names")
    parser.add_argument(
        "--memory", type=float, default=10, help="address space of the process in GiB (default: 10); 0: no limit"
    )
    parser.add_argument("--timeout", type=int, default=90, help="seconds per family (default: 90)")
    parser.add_argument("--out", type=Path, default=Path("runs/transformers"), help="output folder")
    parser.add_argument("--again", nargs="+", default=(), choices=report.STATUSES, help="statuses to check again")
    parser.add_argument("--report", type=Path, nargs="+", metavar="DIR", help="only merge the results in these folders")
    parser.add_argument("--hardware", default="", help="machine name in the report (default: its CPU)")
    return parser.parse_args(argv)


def prepare(options: argparse.Namespace) -> None:
    """Limit threads and memory, and silence transformers."""
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    if limit := int(options.memory * GIB):
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


class FamilyJournal(Journal):
    """The journal of families, which have no library."""

    def record_crash(self) -> None:
        """Record a started family without a result as crashed."""
        last = lines(self.path)[-1:]
        if last and "started" in last[0]:
            name = last[0]["started"]
            self.write({"name": name, "status": "crashed", "error": "the process ended during the check"})


def check_family(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Check the recipe in one family and return the record; errors become part of it."""
    started = time.perf_counter()
    record: dict[str, Any] = {"name": name}
    try:
        with warnings.catch_warnings(), time_limit(options.timeout):
            warnings.simplefilter("ignore")
            record |= _check_family(name, options.recipe, record)
    except CheckFailed as error:
        record |= {"status": "failed", "error": str(error)}
    except NotRunnable as error:
        record |= {"status": "not run", "error": str(error)}
    except (TimeoutError, IndexError) as error:  # CLVP indexes an embedding with what its decoder generates
        record |= {"status": "not run", "error": f"{type(error).__name__}: {error}"}
    except Exception as error:
        status = "failed" if "runs" in record else "not built"
        record |= {"status": status, "error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    return record | {"seconds": round(time.perf_counter() - started, 1)}


def _check_family(name: str, recipe: str, record: dict[str, Any]) -> dict[str, Any]:
    if reason := _STUBS.get(name, ""):
        return {"status": "not run", "error": reason}
    for model in tiny.models(name):
        record["parameters"] = sum(p.numel() for p in model.parameters())
        if not list(stacks(model)):
            if classes := attentions(model):  # XLM: one list of attentions, one of norms, one of MLPs
                return {"status": "refused", "error": f"{', '.join(sorted(classes))}: no module is a whole layer"}
            return {"status": "no layers"}
        runs, missing, error = find_runs(model)
        if not missing:
            record.pop("error", None)
            record["runs"] = [run.name for run in runs]
            return run_case(CASES[recipe], model, runs)
        reason = reason or f"no inputs found for {', '.join(missing)}: {error}"
        record["error"] = reason
    return {"status": "not run", "error": reason}


if __name__ == "__main__":
    sys.exit(main())

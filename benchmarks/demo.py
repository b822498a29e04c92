"""Regularizers injected into a timm model that learns from 100 real images: `python benchmarks/demo.py`.

Without a regularizer, and with Dropout, Dropout2d, DropBlock and DropPath under the linear keep-prob schedule, in
pairs of runs that share training set, initial weights and batch order. It takes some minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import curves
import digits
import hookdrop
import paired
import report
import timing
from arms import ARMS, NONE, Arm, P
from terminal import make_console, progress, say

BASELINE = 90.0
# Run once more, to see that a seed fixes a run: the arm with the most elaborate masks.
REPEATED = (next(arm for arm in ARMS if arm.name == "DropBlock"), 0)


def main(argv: Sequence[str] | None = None) -> int:
    """Train, compare and report; 1 if a run failed or a promise was not kept."""
    started = time.perf_counter()
    options = parse_options(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    console = make_console()
    describe(console, options)
    results: dict[str, Any] = {"settings": settings(options)}
    with ProcessPoolExecutor(options.workers, get_context("spawn"), initializer=start_worker) as pool:
        results |= train_all(pool, options, console)
        if not results["failures"]:
            say(console, "timing training steps, in one process with nothing beside it ...")
            results["time_ratios"] = pool.submit(timing.ratios, ARMS, options.timing).result()
    path = options.out / "results.json"
    try:
        kept = not results["failures"] and conclude(console, options.out, results)
    finally:
        results["total_seconds"] = time.perf_counter() - started
        path.write_text(json.dumps(results, indent=1, allow_nan=False))
        say(console, f"All numbers: {path}")
    say(console, f"Total time: {results['total_seconds']:.0f} s with {options.workers} worker processes")
    return 0 if kept else 1


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder of results.json and curves.png")
    parser.add_argument("--seeds", type=int, default=8, help="pairs of runs, at least 2")
    parser.add_argument("--epochs", type=int, default=80, help=f"of {digits.STEPS_PER_EPOCH} steps each")
    parser.add_argument("--workers", type=int, default=min(os.cpu_count() or 1, 8), help="processes that train")
    parser.add_argument("--timing", type=float, default=12.0, help="seconds for timing training steps")
    options = parser.parse_args(argv)
    if options.seeds < 2 or options.epochs < 1 or options.workers < 1:
        parser.error("--seeds must be at least 2, --epochs and --workers at least 1")
    return options


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """All that the numbers depend on."""
    packages = ("hookdrop", "torch", "timm", "numpy", "scikit-learn", "scipy")
    return {
        "versions": {"python": platform.python_version()} | {name: version(name) for name in packages},
        "cpu_count": os.cpu_count(),
        "workers": options.workers,
        "seeds": options.seeds,
        "epochs": options.epochs,
        "steps": options.epochs * digits.STEPS_PER_EPOCH,
        "batch": digits.BATCH,
        "model": digits.MODEL,
        "optimizer": {"name": "AdamW, cosine", **digits.OPTIMIZER},
        "image_size": digits.SIZE,
        "schedule": "LinearSchedule",
        "measured_epochs": paired.MEASURED_EPOCHS,
        "arms": [asdict(arm) for arm in ARMS],
    }


def describe(console: Console, options: argparse.Namespace) -> None:
    """What is about to be done, and where the hooks will be."""
    steps = options.epochs * digits.STEPS_PER_EPOCH
    say(
        console,
        f"timm {digits.MODEL['name']} with channels {digits.MODEL['channels']} on scikit-learn's digits, enlarged to "
        f"{digits.SIZE}x{digits.SIZE}: {digits.TRAIN_IMAGES} training and {digits.TEST_IMAGES} test images, {steps} "
        f"steps of {digits.BATCH}.\n{len(ARMS)} arms x {options.seeds} seeds. p = {P} for all: fixed, not tuned.\n",
    )
    for arm in ARMS:
        if arm.name in ("DropBlock", "DropPath"):
            say(console, f"{arm.plan(digits.make_model(), steps)}\n")
    say(console, "Dropout and Dropout2d are on the same layers as DropBlock.\n")


def start_worker() -> None:
    """One thread a process; a doubt of hookdrop's fails the run."""
    torch.set_num_threads(1)
    warnings.simplefilter("error", hookdrop.HookdropWarning)


def train_all(pool: ProcessPoolExecutor, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """The outcomes in the order of seeds and arms, the repeated run, and what went wrong."""
    jobs: list[tuple[Arm, int]] = [(arm, seed) for seed in range(options.seeds) for arm in ARMS]
    futures = [pool.submit(paired.run, arm, seed, options.epochs) for arm, seed in [*jobs, REPEATED]]
    with progress(console, len(futures)) as advance:
        for _ in as_completed(futures):
            advance()
    failures = [
        f"{arm.name}, seed {seed}: {type(error).__name__}: {error}"
        for (arm, seed), future in zip([*jobs, REPEATED], futures, strict=True)
        if (error := future.exception())
    ]
    for failure in failures:
        say(console, f"FAILED: {failure}")
    outcomes = [None if future.exception() else future.result() for future in futures]
    return {"runs": [run for run in outcomes[:-1] if run], "repeated": outcomes[-1], "failures": failures}


def conclude(console: Console, out: Path, results: dict[str, Any]) -> bool:
    """Check the pairs, print and draw what came out, and add it to `results`; whether all promises were kept."""
    paired.check_pairs(results["runs"])
    runs = report.by_arm(results["runs"])
    intervals = {metric: report.intervals_of(runs, metric) for metric in report.METRICS}
    results["differences"] = {
        metric: [{"arm": arm, "other": other, **asdict(interval)} for (arm, other), interval in found.items()]
        for metric, found in intervals.items()
    }
    say(console, f"\n{report.legend(len(runs[NONE.name]))}")
    console.print(report.table(runs, ARMS, intervals, results["time_ratios"]))
    baseline = statistics.fmean(run["accuracy"] for run in runs[NONE.name])
    if baseline < BASELINE:
        say(console, f"Beware: without a regularizer it is only {baseline:.1f} %; {BASELINE:g} % or more were wanted.")
    for metric in report.METRICS:
        say(console, report.in_words(metric, intervals[metric]))
    say(console, report.caveat(sum(map(len, intervals.values()))) + "\n")
    results["promises"] = promises(console, results["runs"], results["repeated"])
    curves.draw(out / "curves.png", runs, intervals, digits.STEPS_PER_EPOCH)
    say(console, f"Curves: {out / 'curves.png'}")
    return all(results["promises"].values())


def promises(console: Console, runs: Sequence[dict[str, Any]], repeated: dict[str, Any]) -> dict[str, bool]:
    """Say what held, and what did not."""
    hooked = [run for run in runs if run["changes"] is not None]
    changed = [run for run in hooked if run["changes"]]
    twin = next(run for run in runs if (run["arm"], run["seed"]) == (repeated["arm"], repeated["seed"]))
    kept = {"bit_identical": not changed, "repeatable": paired.same_numbers(twin, repeated)}
    say(
        console,
        f"Pairs: initial weights, batch indices (SHA-256) and first loss are equal within all {len(runs) // len(ARMS)} "
        f"seeds.\nstate_dict, repr and eval output bit-identical with hooks on and after removal: "
        f"{_yes(not changed)} ({len(hooked) - len(changed)} of {len(hooked)} runs).\n"
        f"{repeated['arm']}, seed {repeated['seed']}, run again: the same numbers to the last bit: "
        f"{_yes(kept['repeatable'])}.",
    )
    for run in changed:
        say(console, f"  {run['arm']}, seed {run['seed']}: {'; '.join(run['changes'])}")
    return kept


def _yes(kept: bool) -> str:
    return "yes" if kept else "NO"


if __name__ == "__main__":
    sys.exit(main())

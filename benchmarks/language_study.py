"""Compare regularizers on small language models: `python benchmarks/language_study.py --workers 2`.

It can be interrupted at any time. The same command resumes it and trains only the missing runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from comparison.engines.store import replace_file
from language import corpus, report, training
from language.arms import ARMS, CONTROLS, DECAYS, DECAYS_OF_NONE, NONE, Arm
from language.training import Run

SEEDS = range(12)
TUNING_SEED, OTHER_SEEDS = 1_000_000, 2_000_000
Tuned = Mapping[tuple[str, str], tuple[float, float]]
"""By model and arm: the factor of the rates and the weight decay."""


def main() -> int:
    """Tune, train and report; return 1 if a control does not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/language"), help="folder of the runs and the report")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each (default: 2)")
    parser.add_argument("--models", nargs="+", choices=[*CONTROLS], default=[*CONTROLS])
    parser.add_argument("--only-tuning", action="store_true", help="stop before the first final run")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    arms, sha256 = [arm for arm in ARMS if arm.family in args.models], _corpus(args.out)
    tuned = _tune(arms, sha256, args)
    if args.only_tuning:
        return 0
    runs = {key: _run(*settings, sha256) for key, settings in _final(arms, tuned)}
    # Seed by seed, so that an interrupted study has complete pairs.
    records = _train(sorted(runs.values(), key=lambda run: run.seed % OTHER_SEEDS), args, "Final runs")
    return report.write({key: records[run.key] for key, run in runs.items()}, tuned, args.out)


def _final(arms: Sequence[Arm], tuned: Tuned) -> list[tuple[tuple[str, str, int], tuple[Arm, float, float, int]]]:
    """The settings of all final runs, by model, arm and seed of the pair; with the two controls."""
    found = []
    for arm, seed in itertools.product(arms, SEEDS):
        value, decay = tuned[arm.family, arm.like or arm.name]
        found.append(((arm.family, arm.name, seed), (arm, value, decay, seed)))
        if arm.name == NONE:
            found.append(((arm.family, report.OTHER, seed), (arm, value, decay, seed + OTHER_SEEDS)))
        if arm.name == CONTROLS[arm.family]:
            found.append(((arm.family, report.ZERO, seed), (arm, 0.0, tuned[arm.family, NONE][1], seed)))
    return found


def _tune(arms: Sequence[Arm], sha256: str, args: argparse.Namespace) -> Tuned:
    """Train each point of each arm's grid with one seed, and choose the lowest validation loss."""
    grids: dict[tuple[str, str], list[Run]] = {}
    for arm in arms:
        points = [(0.0, decay) for decay in DECAYS_OF_NONE] if arm.name == NONE else itertools.product(arm.values, DECAYS)
        grids[arm.family, arm.name] = [_run(arm, *point, TUNING_SEED, sha256) for point in points]
    records = _train([run for grid in grids.values() for run in grid], args, "Tuning")
    chosen = {}
    for key, grid in grids.items():
        if grid:
            best = min(grid, key=lambda run: min(records[run.key]["validation_loss"].values()))
            chosen[key] = best.value, best.weight_decay
    return chosen


def _run(arm: Arm, value: float, decay: float, seed: int, sha256: str) -> Run:
    return Run(arm.name, arm.model, value, decay, seed, sha256)


def _corpus(out: Path) -> str:
    """Store the corpus for the workers, and return its SHA-256."""
    text = corpus.load()
    torch.save(vars(text), out / "corpus.pt")
    return text.sha256


def _train(runs: Sequence[Run], args: argparse.Namespace, title: str) -> dict[str, Any]:
    """Train the missing runs in worker processes. Each record is a file that is written as a whole."""
    paths = {run.key: args.out / f"{run.key}.json" for run in runs}
    missing = [run for run in runs if not paths[run.key].exists()]
    with ProcessPoolExecutor(args.workers, get_context("spawn"), _start, (args.out,)) as pool:
        waiting = [pool.submit(_execute, run, paths[run.key]) for run in missing]
        for done in track(as_completed(waiting), f"{title}: {len(runs)} runs", len(waiting)):
            done.result()
    return {key: json.loads(path.read_text()) for key, path in paths.items()}


_text: corpus.Corpus


def _start(out: Path) -> None:
    global _text
    torch.set_num_threads(1)
    _text = corpus.Corpus(**torch.load(out / "corpus.pt"))


def _execute(run: Run, path: Path) -> None:
    replace_file(path, json.dumps(training.execute(run, _text)).encode())


if __name__ == "__main__":
    sys.exit(main())

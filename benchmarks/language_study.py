"""Compare regularizers on small language models: `python benchmarks/language_study.py --workers 2`.

It can be interrupted at any time. The same command resumes it and trains only the missing runs.
"""

import argparse
import itertools
import json
import packages  # noqa: F401
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from joblib import Parallel, delayed

from comparison.engines.store import replace_file
from language import corpus, report
from language.arms import ARMS, CONFIG, MODELS, NONE, Arm
from language.training import Run, costs, execute

SEEDS = range(CONFIG["seeds"])
FIRST = ("lstm", "decoder")
TUNING_SEED, OTHER_SEEDS = 1_000_000, 2_000_000
Tuned = Mapping[tuple[str, str], tuple[float, float]]
"""By model and arm: the factor of the rates and the weight decay."""


def main() -> int:
    """Tune, train and report; return 1 if a control does not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/language"), help="folder of the runs and the report")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each (default: 2)")
    parser.add_argument("--models", nargs="+", default=FIRST, choices=[*MODELS], help="(default: lstm decoder)")
    parser.add_argument("--only-tuning", action="store_true", help="measure costs and tune, without any final run")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    study = Study(corpus.load(), args.out, args.workers, args.models)
    spent, tuned = study.costs(), study.tune()
    if args.only_tuning:
        return 0
    return report.write(study.final(tuned), tuned, spent, args.out)


class Study:
    """The runs of all arms of some models, each of which is a file in a folder."""

    def __init__(self, text: corpus.Corpus, out: Path, workers: int, models: Sequence[str] = FIRST) -> None:
        self.text, self.out, self.workers = text, out, workers
        self.arms = [arm for arm in ARMS if arm.family in models]

    def costs(self, rounds: int = 61) -> Any:
        """The time and the operations of a step of each tuned arm, in turn and alone on the machine."""
        path = self.out / "costs.json"
        if not path.exists():
            torch.set_num_threads(1)
            grids: dict[str, list[Run]] = {}
            for arm in self.arms:
                if arm.values or arm.name == NONE:
                    value = (*arm.values, 0.0)[len(arm.values) // 2]
                    grids.setdefault(arm.family, []).append(self._run(arm, value, 0.1, TUNING_SEED))
            found = {model: costs(runs, self.text, rounds) for model, runs in grids.items()}
            replace_file(path, json.dumps(found, indent=1).encode())
        return json.loads(path.read_text())

    def tune(self) -> Tuned:
        """Train each point of each arm's grid with one seed, and choose the lowest validation loss."""
        grids: dict[tuple[str, str], list[Run]] = {}
        for arm in self.arms:
            values, decays = (arm.values, "weight_decay") if arm.name != NONE else ([0.0], "weight_decay_none")
            points = itertools.product(values, MODELS[arm.family][decays])
            if found := [self._run(arm, *point, TUNING_SEED) for point in points]:
                grids[arm.family, arm.name] = found
        records = self._train([run for grid in grids.values() for run in grid])
        loss = {key: min(record["validation_loss"].values()) for key, record in records.items()}
        best = {key: min(grid, key=lambda run: loss[run.key]) for key, grid in grids.items()}
        return {key: (run.value, run.weight_decay) for key, run in best.items()}

    def final(self, tuned: Tuned) -> report.Records:
        """Train all arms and the two controls, seed by seed, so that an interrupted study has complete pairs."""
        runs: dict[tuple[str, str, int], Run] = {}
        for seed, arm in itertools.product(SEEDS, self.arms):
            value, decay = tuned[arm.family, arm.like or arm.name]
            runs[arm.family, arm.name, seed] = self._run(arm, value, decay, seed)
            if arm.name == NONE:
                runs[arm.family, report.OTHER, seed] = self._run(arm, value, decay, seed + OTHER_SEEDS)
            if arm.name == MODELS[arm.family]["control"]:
                runs[arm.family, report.ZERO, seed] = self._run(arm, 0.0, tuned[arm.family, NONE][1], seed)
        records = self._train([*runs.values()])
        return {key: records[run.key] for key, run in runs.items()}

    def _run(self, arm: Arm, value: float, decay: float, seed: int) -> Run:
        return Run(arm.name, arm.model, value, decay, seed, self.text.sha256)

    def _train(self, runs: Sequence[Run]) -> dict[str, Any]:
        paths = {run.key: self.out / f"{run.key}.json" for run in runs}
        missing = [run for run in runs if not paths[run.key].exists()]
        Parallel(self.workers, verbose=5)(delayed(_execute)(run, self.text, paths[run.key]) for run in missing)
        return {key: json.loads(path.read_text()) for key, path in paths.items()}


def _execute(run: Run, text: corpus.Corpus, path: Path) -> None:
    torch.set_num_threads(1)
    replace_file(path, json.dumps(execute(run, text)).encode())


if __name__ == "__main__":
    sys.exit(main())

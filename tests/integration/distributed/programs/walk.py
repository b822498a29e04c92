"""Each rank writes the records that it received to a file: `torchrun walk.py FOLDER`."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[4]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch
import torch.distributed as dist

from comparison.engines.base import Beat, EngineError
from comparison.engines.store import Store
from comparison.engines.torchrun import TorchrunEngine
from comparison.run.record import Record
from comparison.spec.run_spec import Run
from tests.support.comparison_jobs import record_of, runs_of


def job(run: Run, beat: Beat, scratch: Path) -> Record:
    """Sum over the ranks; the arm's name says which rank fails or is late."""
    what, _, rank = run.arm.name.partition(" ")
    if rank == str(dist.get_rank()):
        if what == "fails":
            raise FloatingPointError("the loss is nan")
        if what == "late":
            time.sleep(0.5)
    total = torch.tensor([1.0 + dist.get_rank()])
    dist.all_reduce(total)
    beat(1, 1, 0.5)
    return record_of(run, total=total.item(), by=dist.get_rank(), backend=dist.get_backend())


def walk(engine: TorchrunEngine, arms: list[str], store: Store | None, folder: Path, world: int = 2) -> list[Any]:
    # Only the first rank decides which runs are missing.
    runs = runs_of(*arms, world=world) if store else []
    records = list(engine.run(runs, job, store, folder))
    return [[each.spec["arm"]["name"], each.outcome, each.failure and vars(each.failure)] for each in records]


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    store = Store(folder / "runs") if rank == 0 else None
    engine = TorchrunEngine(timeout=60)
    found = {"first": walk(engine, ["good", "fails 1", "late 0", "fails 0", "good"], store, folder)}
    found["second"] = walk(engine, ["other"], store, folder)
    try:
        walk(engine, ["good"], store, folder, world=3)
    except EngineError as error:
        found["refused"] = [str(error)]
    found["initialized"] = [dist.is_initialized()]
    (folder / f"rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""The interface of engines."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from comparison.engines.store import Store
from comparison.run.record import Beat, Record
from comparison.spec.run_spec import Run

BEAT_SECONDS = 0.5


class Job(Protocol):
    """Trains one run; must be picklable."""

    def __call__(self, run: Run, beat: Beat, scratch: Path) -> Record: ...


class Engine(Protocol):
    """Executes runs and stores their records."""

    def run(self, runs: Sequence[Run], job: Job, store: Store, scratch: Path) -> Iterator[Record]:
        """Yield the record of each run when it finishes, including failed runs.

        Every record has been added to the store, except for failed records when the disk is full.

        Args:
            runs: Runs with different keys that are not done. If one is done, `LocalEngine` and `RayEngine` yield the
                stored record; `TorchrunEngine` trains it again, and the store keeps the first record.
            job: Trains one run.
            store: The store of records.
            scratch: A folder for temporary files of the job.
        """
        ...


class EngineError(Exception):
    """The engine cannot run; nothing was trained."""


def label(run: Run) -> str:
    """A human-readable name of the run."""
    stage = "" if run.stage == "final" else f", {run.stage}"
    return f"{run.cell}: {run.arm.name}, seed {run.seed}{stage}"


def throttled(beat: Beat, seconds: float = BEAT_SECONDS) -> Beat:
    """Limit how often a progress callback is called."""
    last = -float("inf")

    def forward(step: int, steps: int, loss: float) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= seconds:
            last = now
            beat(step, steps, loss)

    return forward

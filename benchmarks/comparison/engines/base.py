"""What an engine is given and what it gives back."""

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
    """Trains one run: a callable of a module, so that it can be pickled."""

    def __call__(self, run: Run, beat: Beat, scratch: Path) -> Record: ...


class Engine(Protocol):
    """Does runs, and keeps their records."""

    def run(self, runs: Sequence[Run], job: Job, store: Store, scratch: Path) -> Iterator[Record]:
        """Each run's record as it finishes, in the store already; failures are records too.

        A failed record is not in the store only if the store has no room for it.

        Args:
            runs: runs with different keys, none of them done. `LocalEngine` and `RayEngine` give the record of one
                that is done after all; `TorchrunEngine` does it again, and the first record stays.
            job: what trains one.
            store: where records go.
            scratch: a folder for what the job leaves while it works.
        """
        ...


class EngineError(Exception):
    """The engine can't work at all; nothing was trained."""


def label(run: Run) -> str:
    """A run for a person who watches."""
    stage = "" if run.stage == "final" else f", {run.stage}"
    return f"{run.cell}: {run.arm.name}, seed {run.seed}{stage}"


def seldom(beat: Beat, seconds: float = BEAT_SECONDS) -> Beat:
    """A beat that is passed on at most so often: a step may take a millisecond."""
    last = -float("inf")

    def pass_on(step: int, steps: int, loss: float) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= seconds:
            last = now
            beat(step, steps, loss)

    return pass_on

"""Train missing runs with the selected engine."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from comparison.engines.base import Engine
from comparison.engines.local import LocalEngine
from comparison.engines.ray import RayEngine
from comparison.engines.store import Store
from comparison.engines.torchrun import TorchrunEngine
from comparison.run import checkpoints
from comparison.run.record import Record
from comparison.run.training import execute
from comparison.spec.run_spec import Run
from comparison.spec.search import Search, tune
from comparison.spec.study import Tunings


def choose_engine(name: str, workers: int, address: str | None) -> Engine:
    """Build the named engine, or the torchrun engine if torchrun started this process.

    Raises:
        EngineError: The engine is not available.
    """
    if "RANK" in os.environ:
        return TorchrunEngine()
    return RayEngine(address, workers) if name == "ray" else LocalEngine(workers)


def follow(engine: Engine, scratch: Path) -> int:
    """Train the runs that rank 0 requests, until it requests none."""
    assert isinstance(engine, TorchrunEngine)
    while list(engine.run([], execute, None, scratch)):
        pass
    return 0


def release_ranks(engine: Engine) -> None:
    """Let the other torchrun processes exit."""
    if isinstance(engine, TorchrunEngine):
        list(engine.run([], execute, None, Path()))


class Watch(Protocol):
    """Displays progress: a context manager whose callback takes each finished record."""

    def __call__(self, total: int, title: str) -> AbstractContextManager[Callable[[Record], None]]: ...


@dataclass
class Runner:
    """Trains the runs that are not in the store."""

    store: Store
    engine: Engine
    scratch: Path
    watch: Watch
    requested: dict[str, Record] = field(default_factory=dict)
    """All records requested so far, including tuning."""
    retry: bool = False
    """Also retry failures that are not transient, after the user fixed their cause."""
    unstored: dict[str, Record] = field(default_factory=dict)
    """Failed records that did not fit on the disk."""
    tried: set[str] = field(default_factory=set)
    """Runs that failed in this process; they are not retried until the next start."""

    def ensure(self, runs: Sequence[Run], title: str) -> Mapping[str, Record]:
        """Train the missing runs, and return the record of each run by its key."""
        missing = self.missing(runs)
        if missing:
            with self.watch(len(missing), title) as advance:
                for record in self.engine.run(missing, execute, self.store, self.scratch):
                    self._note_failure(record)
                    advance(record)
                    if record.done and record.key not in self.unstored:
                        checkpoints.delete(self.scratch, record.key)
        found = self.records(runs)
        self.requested.update(found)
        return found

    def missing(self, runs: Sequence[Run]) -> list[Run]:
        """The runs without a record, and those whose failure should be retried."""
        by_key = {run.key: run for run in runs}
        known = self.records(runs)
        return [run for key, run in by_key.items() if self._should_train(key, known.get(key))]

    def records(self, runs: Sequence[Run]) -> Mapping[str, Record]:
        """The available records of these runs."""
        found = self.store.records([run.key for run in runs])
        return {**{run.key: self.unstored[run.key] for run in runs if run.key in self.unstored}, **found}

    def tune(self, searches: Mapping[tuple[str, str], Search]) -> Tunings:
        """Run all searches."""
        rounds = itertools.count(1)

        def score(runs: Sequence[Run]) -> dict[str, float | None]:
            records = self.ensure(runs, f"Tuning, round {next(rounds)}")
            return {key: record.outcome["nll"] if record.outcome else None for key, record in records.items()}

        return dict(zip(searches, tune(list(searches.values()), score), strict=True))

    def _should_train(self, key: str, record: Record | None) -> bool:
        if record is None:
            return True
        if record.failure is None or key in self.tried:
            return False
        return self.retry or record.failure.transient

    def _note_failure(self, record: Record) -> None:
        if record.failure is None:
            return
        self.tried.add(record.key)
        if self.store.get(record.key) is None:
            self.unstored[record.key] = record

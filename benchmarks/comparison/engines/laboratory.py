"""Makes the runs that are missing, with the engine that was asked for."""

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
from comparison.run.checkpoints import forget
from comparison.run.record import Record
from comparison.run.training import execute
from comparison.spec.run_spec import Run
from comparison.spec.search import Search, tune
from comparison.spec.study import Tunings


def choose_engine(name: str, workers: int, address: str | None) -> Engine:
    """The engine of a name; torchrun's if torchrun started this process.

    Raises:
        EngineError: it can't be had.
    """
    if "RANK" in os.environ:
        return TorchrunEngine()
    return RayEngine(address, workers) if name == "ray" else LocalEngine(workers)


def follow(engine: Engine, scratch: Path) -> int:
    """Take part in the runs that the first process demands, until it demands none."""
    assert isinstance(engine, TorchrunEngine)
    while list(engine.run([], execute, None, scratch)):
        pass
    return 0


def dismiss(engine: Engine) -> None:
    """Let the other processes end."""
    if isinstance(engine, TorchrunEngine):
        list(engine.run([], execute, None, Path()))


class Watch(Protocol):
    """Shows how far a number of runs is: called with the total, it gives what is told of each record."""

    def __call__(self, total: int, title: str) -> AbstractContextManager[Callable[[Record], None]]: ...


@dataclass
class Laboratory:
    """Makes runs that are not in the store yet."""

    store: Store
    engine: Engine
    scratch: Path
    watch: Watch
    seen: dict[str, Record] = field(default_factory=dict)
    """Every record that was asked for, of tuning too."""
    again: bool = False
    """Whether failures that would come again are tried again, as their cause was mended."""
    unstored: dict[str, Record] = field(default_factory=dict)
    """Failures that there was no room to write down."""
    tried: set[str] = field(default_factory=set)
    """Runs that failed since this process began: not tried again before its next start."""

    def demand(self, runs: Sequence[Run], title: str) -> Mapping[str, Record]:
        """The record of each run by its key."""
        missing = self.missing(runs)
        if missing:
            with self.watch(len(missing), title) as advance:
                for record in self.engine.run(missing, execute, self.store, self.scratch):
                    self._note(record)
                    advance(record)
                    if record.done and record.key not in self.unstored:
                        forget(self.scratch, record.key)
        found = self.records(runs)
        self.seen.update(found)
        return found

    def missing(self, runs: Sequence[Run]) -> list[Run]:
        """Those without a record, and those whose failure may have passed."""
        wanted = {run.key: run for run in runs}
        known = self.records(runs)
        return [run for key, run in wanted.items() if self._open(key, known.get(key))]

    def records(self, runs: Sequence[Run]) -> Mapping[str, Record]:
        """Of the runs that have one."""
        found = self.store.records([run.key for run in runs])
        return {**{run.key: self.unstored[run.key] for run in runs if run.key in self.unstored}, **found}

    def tune(self, searches: Mapping[tuple[str, str], Search]) -> Tunings:
        """What each search chose."""
        rounds = itertools.count(1)

        def score(runs: Sequence[Run]) -> dict[str, float | None]:
            records = self.demand(runs, f"Tuning, round {next(rounds)}")
            return {key: record.outcome["nll"] if record.outcome else None for key, record in records.items()}

        return dict(zip(searches, tune(list(searches.values()), score), strict=True))

    def _open(self, key: str, record: Record | None) -> bool:
        if record is None:
            return True
        if record.failure is None or key in self.tried:
            return False
        return self.again or record.failure.passing

    def _note(self, record: Record) -> None:
        if record.failure is None:
            return
        self.tried.add(record.key)
        if self.store.get(record.key) is None:
            self.unstored[record.key] = record

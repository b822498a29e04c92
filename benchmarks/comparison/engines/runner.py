"""Train the runs that are not in the store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from comparison.engines import local, ray
from comparison.engines.store import Store
from comparison.engines.work import Job
from comparison.run import checkpoints
from comparison.run.record import Record
from comparison.run.training import execute
from comparison.spec.run_spec import Run
from comparison.spec.study import Tunings
from comparison.spec.tuning import Search

Engine = Callable[[Sequence[Run], Job, Store, Path], Iterator[Record]]
"""Trains runs with a job, and yields the record of each when it finishes, including failed runs."""


def choose_engine(name: str, workers: int, address: str | None) -> Engine:
    """The engine `local` or `ray`."""
    return (
        partial(ray.train, workers=workers, address=address) if name == "ray" else partial(local.train, workers=workers)
    )


class Watch(Protocol):
    """Displays progress: a context manager whose callback takes each finished record."""

    def __call__(self, total: int, title: str) -> AbstractContextManager[Callable[[Record], None]]: ...


@dataclass
class Runner:
    """Trains missing runs, and collects the records of all requested ones, including tuning."""

    store: Store
    engine: Engine
    scratch: Path
    watch: Watch
    retry: bool = False
    """Also retry failures that are not transient, after the user fixed their cause."""
    requested: dict[str, Record] = field(default_factory=dict)

    def ensure(self, runs: Sequence[Run], title: str) -> Mapping[str, Record]:
        """Train the missing runs, and return the record of each run by its key."""
        wanted = {run.key: run for run in runs}
        found = self.store.records(wanted)
        for again in (False, True):
            if missing := [run for key, run in wanted.items() if self._should_train(found.get(key), again)]:
                found |= self._train(missing, f"{title}, once more after a kill" if again else title)
        self.requested |= found
        return found

    def tune(self, searches: Mapping[tuple[str, str], Search]) -> Tunings:
        """Run all searches."""
        records = self.ensure([run for search in searches.values() for run in search.runs()], "Tuning")
        losses = {key: record.outcome["nll"] if record.outcome else None for key, record in records.items()}
        return {arm: search.result(losses) for arm, search in searches.items()}

    def _should_train(self, record: Record | None, again: bool) -> bool:
        if record is None or record.failure is None:
            return record is None
        return record.failure.kind == "killed" if again else self.retry or record.failure.transient

    def _train(self, runs: Sequence[Run], title: str) -> dict[str, Record]:
        found = {}
        with self.watch(len(runs), title) as advance:
            for record in self.engine(runs, execute, self.store, self.scratch):
                found[record.key] = record
                advance(record)
                if record.done:
                    checkpoints.delete(self.scratch, record.key)
        return found

"""The runs of a comparison, in the order in which they are demanded: trials first, then the pairs and the controls."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from comparison.analysis.schema import Tuning
from comparison.engines.base import Engine
from comparison.engines.store import Store
from comparison.run.checkpoints import forget
from comparison.run.record import Record
from comparison.run.training import execute
from comparison.spec.arms import still_at_0
from comparison.spec.config import NONE, RESERVED, Config
from comparison.spec.entries import Control, Entry
from comparison.spec.run_spec import Arm, Data, Model, Run
from comparison.spec.search import FIRST_SEED, Search, tune, with_settings

OTHER_SEEDS = 2 * FIRST_SEED
"""Where the seeds of the control begin."""

Tunings = Mapping[tuple[str, str], Tuning]
"""By cell and arm."""


class Watch(Protocol):
    """Shows how far a number of runs is: called with the total, it gives what is told of each record."""

    def __call__(self, total: int, title: str) -> AbstractContextManager[Callable[[Record], None]]: ...


@dataclass
class Study:
    """All runs that a config asks for."""

    config: Config
    only: Sequence[str] = ()
    """Names of arms; all if empty. None and the controls are always there."""
    world: int = 1
    command: str = "python benchmarks/compare.py"

    @property
    def arms(self) -> list[Arm]:
        """None, and the arms that were chosen."""
        return [NONE, *(arm for arm in self.config.all_arms() if not self.only or arm.name in self.only)]

    def tuned_arms(self) -> list[Arm]:
        """Those that are tuned themselves: all but the peers, and those whose settings a chosen peer takes."""
        wanted = {self.config.like(arm.name) for arm in self.arms[1:]}
        return [NONE, *(arm for arm in self.config.all_arms() if arm.name in wanted)]

    def searches(self) -> dict[tuple[str, str], Search]:
        """A search for each cell and arm; none if nothing is tuned."""
        if self.config.tuning is None:
            return {}
        return {
            (run.cell, arm.name): Search(self.config.tuning, run)
            for data, model in self.config.cells()
            for arm in self.tuned_arms()
            for run in [self.run(data, model, arm, self.config.first_seed)]
        }

    def entries(self, tunings: Tunings) -> list[Entry]:
        """The arms of each cell with the runs of their seeds, at the settings that tuning chose."""
        return [entry for data, model in self.config.cells() for entry in self._cell(data, model, tunings)]

    def run(self, data: Data, model: Model, arm: Arm, seed: int) -> Run:
        """A final run at the settings that were written."""
        config = self.config
        shared = ("epochs", "batch_size", "optimizer", "label_smoothing", "precision", "compile", "device", "max_steps")
        return Run(
            data=data,
            model=model,
            arm=arm,
            seed=seed,
            world=self.world,
            **{name: getattr(config, name) for name in shared},
        )

    def _cell(self, data: Data, model: Model, tunings: Tunings) -> Iterator[Entry]:
        seeds = range(self.config.first_seed, self.config.first_seed + self.config.seeds)

        def entry(arm: Arm, settings_of: str, control: Control = "", offset: int = 0) -> Entry:
            run = self.run(data, model, arm, 0)
            tuning = tunings.get((run.cell, settings_of))
            chosen = dict(tuning.chosen) if tuning else {}
            if control:
                # Of a control, all but the optimizer's settings is as written here.
                chosen.pop("p", None)
            run = with_settings(run, chosen)
            runs = {seed: run.model_copy(update={"seed": seed + offset}) for seed in seeds}
            own = tuning if settings_of == arm.name else None
            like = settings_of if tuning and not own else ""
            return Entry(run.cell, run.arm, runs, control, own, like, self._command(arm, control))

        for arm in self.arms:
            yield entry(arm, self.config.like(arm.name) if arm is not NONE else arm.name)
        if still := next(filter(still_at_0, self.arms), None):
            yield entry(still.model_copy(update={"name": RESERVED[2], "p": 0.0}), NONE.name, "aa")
        yield entry(NONE.model_copy(update={"name": RESERVED[1]}), NONE.name, "seeds", OTHER_SEEDS)

    def _command(self, arm: Arm, control: str) -> str:
        chosen = [] if control or arm is NONE else ["--only", arm.name]
        return " ".join([self.command, shlex.join(chosen)]).strip()


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
        results = tune(list(searches.values()), lambda runs: self.demand(runs, f"Tuning, round {next(rounds)}"))
        return dict(zip(searches, results, strict=True))

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

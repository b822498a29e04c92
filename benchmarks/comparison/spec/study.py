"""The arms of a comparison and their runs: tuning trials, then pairs and controls."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from comparison.spec.arms import is_identity_at_0
from comparison.spec.config import NONE, RESERVED, Config
from comparison.spec.run_spec import Arm, Data, Model, Run, Training
from comparison.spec.tuning import FIRST_SEED, Search, Tuning, with_settings

OTHER_SEEDS = 2 * FIRST_SEED
"""First seed of the control with other seeds."""
Control = Literal["", "aa", "seeds", "reference"]
Tunings = Mapping[tuple[str, str], Tuning]
"""By cell and arm."""


@dataclass(frozen=True)
class Entry:
    """An arm in one cell with its final runs."""

    cell: str
    arm: Arm
    runs: Mapping[int, Run]
    """By seed of the pair, which differs from the run's seed for the control with other seeds."""
    control: Control = ""
    """`aa`: p = 0 injected, must be bit-identical to none. `seeds`: none with other seeds. `reference`: a probe."""
    tuning: Tuning | None = None  # None if the arm uses its configured settings or those of another arm
    like: str = ""  # the arm whose tuned settings it uses, if any


@dataclass
class Study:
    config: Config

    @property
    def seeds(self) -> range:
        return range(self.config.first_seed, self.config.first_seed + self.config.seeds)

    @property
    def arms(self) -> list[Arm]:
        return [NONE, *self.config.all_arms()]

    def searches(self) -> dict[tuple[str, str], Search]:
        """A search for each cell and each arm whose tuned settings a selected arm uses; empty without tuning."""
        if self.config.tuning is None:
            return {}
        needed = {self.config.like(arm.name) for arm in self.arms[1:]}  # peers use those of a regularizer
        tuned = [NONE, *(arm for arm in self.config.all_arms() if arm.name in needed)]
        runs = [self.run(*cell, arm, self.config.first_seed) for cell in self.config.cells() for arm in tuned]
        return {(run.cell, run.arm.name): Search(self.config.tuning, run) for run in runs}

    def entries(self, tunings: Tunings) -> list[Entry]:
        """The arms of each cell with their final runs, at the tuned settings."""
        return [entry for data, model in self.config.cells() for entry in self._cell(data, model, tunings)]

    def run(self, data: Data, model: Model, arm: Arm, seed: int) -> Run:
        settings = {name: getattr(self.config, name) for name in Training.model_fields}
        return Run(data=data, model=model, arm=arm, seed=seed, **settings)

    def _cell(self, data: Data, model: Model, tunings: Tunings) -> Iterator[Entry]:
        def entry(arm: Arm, settings_of: str, control: Control = "", offset: int = 0) -> Entry:
            run = self.run(data, model, arm, 0)
            tuning = tunings.get((run.cell, settings_of))
            # A control keeps its rate and takes only the tuned settings of the optimizer.
            kept = ("p",) if control else ()
            chosen = {name: value for name, value in (tuning.chosen if tuning else {}).items() if name not in kept}
            run = with_settings(run, chosen)
            runs = {seed: run.model_copy(update={"seed": seed + offset}) for seed in self.seeds}
            own = tuning if settings_of == arm.name else None
            return Entry(run.cell, run.arm, runs, control, own, settings_of if tuning and not own else "")

        for arm in self.arms:
            settings_of = self.config.like(arm.name) if arm is not NONE else arm.name
            yield entry(arm, settings_of, "reference" if arm.kind == "probe" else "")
        if aa := next(filter(is_identity_at_0, self.arms), None):
            yield entry(aa.model_copy(update={"name": RESERVED[2], "p": 0.0}), NONE.name, "aa")
        yield entry(NONE.model_copy(update={"name": RESERVED[1]}), NONE.name, "seeds", OTHER_SEEDS)

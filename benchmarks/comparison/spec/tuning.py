"""Hyperparameter tuning: a grid with the same number of points for each arm, scored on the validation images."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, PositiveInt, model_validator

from comparison.spec.run_spec import Run

FIRST_SEED = 1_000_000
"""First seed of tuning runs; final runs have smaller seeds, the control with other seeds has larger ones."""
Setting = Literal["p", "lr", "weight_decay", "label_smoothing"]


RANGES: dict[Setting, tuple[float, float]] = {
    "p": (0.0, math.inf),
    "lr": (1e-12, 1e6),
    "weight_decay": (0.0, 1e6),
    "label_smoothing": (0.0, 0.999),
}
"""`p` may be a standard deviation; each regularizer checks its own upper bound."""


class TuningConfig(BaseModel):
    """A grid, scored by NLL on the validation images; test images are not used."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    method: Literal["grid"] = "grid"
    seeds: PositiveInt = 2
    """Runs per trial, with seeds that no final run uses."""
    space: dict[Setting, list[float]]
    """The values for arms with a rate."""
    space_none: dict[Setting, list[float]]
    """The values for arms without a rate."""

    @model_validator(mode="after")
    def _is_fair(self) -> TuningConfig:
        for name, values in (*self.space.items(), *self.space_none.items()):
            low, high = RANGES[name]
            if outside := [value for value in values if not low <= value <= high]:
                raise ValueError(f"{name} must be in [{low:g}, {high:g}], got {outside[0]:g}")
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} must have different values, got {values}")
        if "p" in self.space_none:
            raise ValueError("space_none: arms without a rate have no p; tune weight_decay or lr")
        if unmatched := {*self.space_none} ^ ({*self.space} - {"p"}):
            raise ValueError(
                f"{', '.join(sorted(unmatched))} must be in both space and space_none: otherwise the arms would differ "
                "in more than the regularizer"
            )
        ours, none = (math.prod(map(len, space.values())) for space in (self.space, self.space_none))
        if ours != none:
            raise ValueError(
                f"the grid has {ours} points for arms with a rate and {none} for arms without one: every arm must get "
                "the same number of trials"
            )
        return self


class Trial(BaseModel):
    """The settings of a trial and its mean validation NLL over the tuning seeds; None if a run failed."""

    model_config = ConfigDict(extra="forbid")

    settings: dict[str, float]
    score: float | None


class Tuning(BaseModel):
    """The tuning of an arm."""

    model_config = ConfigDict(extra="forbid")

    method: str
    """Such as `grid` or `TPE`."""
    space: dict[str, list[float]]
    """The values of a grid, or the ends of a range."""
    trials: list[Trial]
    seeds: list[int]
    chosen: dict[str, float]
    at_edge: list[str]
    """Settings whose chosen value is at the edge of the search space: a better one may lie outside."""


@dataclass(frozen=True)
class Search:
    """The search of one arm."""

    config: TuningConfig
    run: Run
    """A run of the arm with its configured settings."""

    @property
    def space(self) -> Mapping[str, list[float]]:
        """The values of each setting."""
        space = self.config.space if self.run.arm.p is not None else self.config.space_none
        return {str(name): values for name, values in space.items()}

    def trials(self) -> list[tuple[dict[str, float], list[Run]]]:
        """The settings of each point of the grid, and its runs."""
        points = [dict(zip(self.space, values, strict=True)) for values in itertools.product(*self.space.values())]
        seeds = range(FIRST_SEED, FIRST_SEED + self.config.seeds)
        return [
            (point, [with_settings(self.run, point).model_copy(update={"stage": "tuning", "seed": s}) for s in seeds])
            for point in points
        ]

    def runs(self) -> list[Run]:
        """The runs of all trials."""
        return [run for _, runs in self.trials() for run in runs]

    def result(self, losses: Mapping[str, float | None]) -> Tuning:
        """Choose the trial with the lowest mean NLL, given the NLL of each run by its key, None for a failed run.

        A trial with a failed run has no score. If all trials failed, nothing is chosen.
        """
        trials = []
        for settings, runs in self.trials():
            known = [loss for run in runs if (loss := losses[run.key]) is not None]
            score = statistics.fmean(known) if len(known) == len(runs) else None
            trials.append(Trial(settings=settings, score=score))
        scored = [trial for trial in trials if trial.score is not None]
        chosen = min(scored, key=lambda trial: trial.score or 0.0).settings if scored else {}
        return Tuning(
            method=self.config.method,
            space=dict(self.space),
            trials=trials,
            seeds=list(range(FIRST_SEED, FIRST_SEED + self.config.seeds)),
            chosen=chosen,
            at_edge=[
                name
                for name, value in chosen.items()
                if len(self.space[name]) > 1 and value in (min(self.space[name]), max(self.space[name]))
            ],
        )


def with_settings(run: Run, settings: Mapping[str, float]) -> Run:
    """Return the run with tuned settings."""
    arm = {name: value for name, value in settings.items() if name == "p"}
    own = {name: value for name, value in settings.items() if name == "label_smoothing"}
    optimizer = {name: value for name, value in settings.items() if name not in (*arm, *own)}
    return run.model_copy(
        update={
            "arm": run.arm.model_copy(update=arm),
            "optimizer": run.optimizer.model_copy(update=optimizer),
            **own,
        }
    )

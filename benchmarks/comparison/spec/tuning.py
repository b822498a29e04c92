"""Hyperparameter tuning: a grid with the same number of points for each arm, scored on the validation images."""

import itertools
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator
from typing_extensions import TypedDict

from comparison.spec.run_spec import Run

FIRST_SEED = 1_000_000
"""First seed of tuning runs; final runs have smaller seeds, the control with other seeds has larger ones."""


class Space(TypedDict, total=False):
    p: list[NonNegativeFloat]  # may be a standard deviation; each regularizer checks its own upper bound
    lr: list[PositiveFloat]
    weight_decay: list[NonNegativeFloat]
    label_smoothing: list[Annotated[float, Field(ge=0, lt=1)]]


class TuningConfig(BaseModel):
    """A grid, scored by NLL on the validation images; test images are not used."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    method: Literal["grid"] = "grid"
    seeds: PositiveInt = 2  # runs per trial, with seeds that no final run uses
    space: Space  # for arms with a rate
    space_none: Space  # for arms without a rate

    @model_validator(mode="after")
    def _is_fair(self) -> Self:
        ours, none = (dict[str, list[float]](**space) for space in (self.space, self.space_none))
        for name, values in (*ours.items(), *none.items()):
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} must have different values, got {values}")
        if "p" in none:
            raise ValueError("space_none: arms without a rate have no p; tune weight_decay or lr")
        if unmatched := {*none} ^ ({*ours} - {"p"}):
            raise ValueError(
                f"{', '.join(sorted(unmatched))} must be in both space and space_none: otherwise the arms would differ "
                "in more than the regularizer"
            )
        points = [math.prod(map(len, space.values())) for space in (ours, none)]
        if points[0] != points[1]:
            raise ValueError(
                f"the grid has {points[0]} points for arms with a rate and {points[1]} for arms without one: every arm "
                "must get the same number of trials"
            )
        return self


class Trial(BaseModel):
    """The settings of a trial and its mean validation NLL over the tuning seeds; None if a run failed."""

    settings: dict[str, float]
    score: float | None


class Tuning(BaseModel):
    method: str
    space: dict[str, list[float]]
    trials: list[Trial]
    seeds: list[int]
    chosen: dict[str, float]
    at_edge: list[str]  # settings whose chosen value is at the edge of the space: a better one may lie outside


@dataclass(frozen=True)
class Search:
    """The search of one arm, given a run of it with its configured settings."""

    config: TuningConfig
    run: Run

    @property
    def space(self) -> dict[str, list[float]]:
        return {**(self.config.space if self.run.arm.p is not None else self.config.space_none)}  # type: ignore[dict-item]

    @property
    def seeds(self) -> list[int]:
        return list(range(FIRST_SEED, FIRST_SEED + self.config.seeds))

    def trials(self) -> list[tuple[dict[str, float], list[Run]]]:
        """The settings of each point of the grid, and its runs."""
        points = [dict(zip(self.space, values, strict=True)) for values in itertools.product(*self.space.values())]
        stage = {"stage": "tuning"}
        return [
            (point, [with_settings(self.run, point).model_copy(update=stage | {"seed": seed}) for seed in self.seeds])
            for point in points
        ]

    def runs(self) -> list[Run]:
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
        edges = {name: {min(values), max(values)} for name, values in self.space.items() if len(values) > 1}
        at_edge = [name for name, value in chosen.items() if value in edges.get(name, ())]
        fixed: Any = {"method": self.config.method, "space": self.space, "seeds": self.seeds}
        return Tuning(**fixed, trials=trials, chosen=chosen, at_edge=at_edge)


def with_settings(run: Run, settings: Mapping[str, float]) -> Run:
    owners = {"p": "arm", "lr": "optimizer", "weight_decay": "optimizer"}
    for name, value in settings.items():
        owner = owners.get(name)
        changed = getattr(run, owner).model_copy(update={name: value}) if owner else value
        run = run.model_copy(update={owner or name: changed})
    return run

"""How the arms come to their settings: the same number of trials for each."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, PositiveInt, model_validator

Setting = Literal["p", "lr", "weight_decay", "label_smoothing"]


RANGES: dict[Setting, tuple[float, float]] = {
    "p": (0.0, math.inf),
    "lr": (1e-12, 1e6),
    "weight_decay": (0.0, 1e6),
    "label_smoothing": (0.0, 0.999),
}
"""`p` may be a standard deviation; a probability above 1 is refused with its arm."""


class TuningConfig(BaseModel):
    """A grid, or a search by Optuna, scored by NLL on the validation images; the test images are not looked at."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    method: Literal["grid", "random", "tpe"] = "grid"
    trials: PositiveInt | None = None
    """Of each arm, none too; a grid has as many as it has points."""
    seeds: PositiveInt = 2
    """Runs of a trial, with seeds that no final run has."""
    space: dict[Setting, list[float]]
    """For arms with a rate: the values of a grid, or the lowest and the highest value."""
    space_none: dict[Setting, list[float]]
    """For arms without a rate."""

    @model_validator(mode="after")
    def _is_fair(self) -> TuningConfig:
        for name, space in (("space", self.space), ("space_none", self.space_none)):
            if not space or not all(space.values()):
                raise ValueError(f"{name} has nothing to try")
        for name, values in (*self.space.items(), *self.space_none.items()):
            low, high = RANGES[name]
            if outside := [value for value in values if not low <= value <= high]:
                raise ValueError(f"{name} is tried from {low:g} to {high:g} at most, and {outside[0]:g} is among them")
            if len(set(values)) < len(values):
                raise ValueError(f"{name} has a value twice: a trial would be spent on nothing")
        if "p" in self.space_none:
            raise ValueError("space_none: an arm without a rate has no p; tune weight_decay or lr")
        if apart := {*self.space_none} ^ ({*self.space} - {"p"}):
            raise ValueError(
                f"{', '.join(sorted(apart))} would be tuned for some arms and not for others: what differs then is not "
                "the regularizer alone. Put it into both, space and space_none"
            )
        if self.method != "grid":
            if self.trials is None:
                raise ValueError(f"trials is missing: how often may {self.method} try for each arm?")
            for values in (*self.space.values(), *self.space_none.values()):
                if len(values) != 2 or values[0] >= values[1]:
                    raise ValueError(f"{self.method} searches from the lowest to the highest value, as [0.05, 0.4]")
            return self
        ours, none = (math.prod(map(len, space.values())) for space in (self.space, self.space_none))
        if ours != none:
            raise ValueError(
                f"the grid has {ours} points for arms with a rate and {none} for arms without: every arm gets the same "
                "number of trials"
            )
        if self.trials not in (None, ours):
            raise ValueError(f"trials is {self.trials}, and the grid has {ours} points: leave trials out")
        return self

    @property
    def budget(self) -> int:
        """Trials of each arm."""
        return self.trials or math.prod(map(len, self.space.values()))


class Trial(BaseModel):
    """Settings that were tried in tuning, and the mean validation NLL over the tuning seeds; None if a run failed."""

    model_config = ConfigDict(extra="forbid")

    settings: dict[str, float]
    score: float | None


class Tuning(BaseModel):
    """How an arm came to its settings."""

    model_config = ConfigDict(extra="forbid")

    method: str
    """As in `grid` or `TPE`."""
    space: dict[str, list[float]]
    """The values of a grid, or the two ends of a range."""
    trials: list[Trial]
    seeds: list[int]
    chosen: dict[str, float]
    at_edge: list[str]
    """Settings whose chosen value is the first or the last of its space: a better one may lie outside."""

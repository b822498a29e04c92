"""The configuration and result of hyperparameter tuning, with the same number of trials for each arm."""

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
"""`p` may be a standard deviation; each regularizer checks its own upper bound."""


class TuningConfig(BaseModel):
    """A grid or an Optuna search, scored by NLL on the validation images; test images are not used."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    method: Literal["grid", "random", "tpe"] = "grid"
    trials: PositiveInt | None = None
    """Trials per arm, including none; for a grid, the number of its points."""
    seeds: PositiveInt = 2
    """Runs per trial, with seeds that no final run uses."""
    space: dict[Setting, list[float]]
    """For arms with a rate: the values of a grid, or the ends of a range."""
    space_none: dict[Setting, list[float]]
    """The same for arms without a rate."""

    @model_validator(mode="after")
    def _is_fair(self) -> TuningConfig:
        for name, space in (("space", self.space), ("space_none", self.space_none)):
            if not space or not all(space.values()):
                raise ValueError(f"{name} is empty")
        for name, values in (*self.space.items(), *self.space_none.items()):
            low, high = RANGES[name]
            if outside := [value for value in values if not low <= value <= high]:
                raise ValueError(f"{name} must be in [{low:g}, {high:g}], got {outside[0]:g}")
            if len(set(values)) < len(values):
                raise ValueError(f"{name} has duplicate values, which would waste trials")
        if "p" in self.space_none:
            raise ValueError("space_none: arms without a rate have no p; tune weight_decay or lr")
        if unmatched := {*self.space_none} ^ ({*self.space} - {"p"}):
            raise ValueError(
                f"{', '.join(sorted(unmatched))} must be in both space and space_none: otherwise the arms would differ "
                "in more than the regularizer"
            )
        if self.method != "grid":
            if self.trials is None:
                raise ValueError(f"trials is missing: set the number of {self.method} trials per arm")
            for values in (*self.space.values(), *self.space_none.values()):
                if len(values) != 2 or values[0] >= values[1]:
                    raise ValueError(f"{self.method} requires ranges of two increasing values, such as [0.05, 0.4]")
            return self
        ours, none = (math.prod(map(len, space.values())) for space in (self.space, self.space_none))
        if ours != none:
            raise ValueError(
                f"the grid has {ours} points for arms with a rate and {none} for arms without one: every arm must get "
                "the same number of trials"
            )
        if self.trials not in (None, ours):
            raise ValueError(f"trials={self.trials} does not match the {ours} points of the grid: remove trials")
        return self

    @property
    def budget(self) -> int:
        """Number of trials per arm."""
        return self.trials or math.prod(map(len, self.space.values()))


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

"""What a finished run leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

import numpy as np

Beat = Callable[[int, int, float], None]
"""Called with the optimizer steps done, those in all, and the loss."""
Kind = Literal["nan", "memory", "disk", "killed", "error"]
# What another try may mend; a NaN or an error in the code comes again.
PASSING: tuple[Kind, ...] = ("memory", "disk", "killed")


class Validated(TypedDict):
    """How the model did on the validation images after an epoch."""

    epoch: int
    accuracy: float
    """Per cent."""
    nll: float


class Realised(TypedDict):
    """One site: the mean rate asked for in the forwards that were measured, and the fraction dropped."""

    name: str
    asked: float
    dropped: float


class Mask(TypedDict):
    """What was dropped on one map of one sample: 1 is kept, 0 dropped."""

    site: str
    rows: list[list[int]]


class Outcome(TypedDict):
    """What came out of a training run; JSON-able."""

    call: str
    """The regularizer or recipe as it was injected, with its rate; empty for none."""
    sites: int
    flags: list[str]
    """What the plan warned of."""
    weights_before: str
    """SHA-256 of all parameters and buffers after initialisation."""
    weights_after: str
    batches: list[str]
    """SHA-256 of the indices of each epoch's batches in their order."""
    first_loss: float
    train_loss: list[float]
    """Mean of each epoch."""
    validation: list[Validated]
    rates: list[tuple[int, float]]
    """(optimizer step, rate in force), before the first epoch and after each; empty for none."""
    rate_at_end: float | None
    ramp_end: int | None
    """The optimizer step at which the rate was first within 1e-9 of its target; None if never, or for none."""
    asked: float | None
    """Over all sites and all training forwards of the last epochs; None for none and for what drops nothing."""
    dropped: float | None
    realised: list[Realised]
    changes: list[str] | None
    """What differs of state_dict, repr and eval output while hooked or after `remove()`; None for none."""
    mask: Mask | None
    accuracy: float
    """Per cent, on the scored images: test images, or validation images of a tuning run; after the last epoch."""
    nll: float
    ece: float
    """Per cent; 15 bins of equal width."""
    outputs: str
    """SHA-256 of the scored images' logits."""
    steps: int
    train_images: int
    scored_images: int
    skipped_images: int


@dataclass(frozen=True)
class Failure:
    """Why a run has no outcome."""

    kind: Kind
    message: str

    @property
    def passing(self) -> bool:
        """Whether the next start of the comparison tries again."""
        return self.kind in PASSING


@dataclass(frozen=True)
class Record:
    """One run: what was asked for, and what came out or went wrong."""

    key: str
    spec: Mapping[str, Any]
    """`Run.model_dump(mode="json")`."""
    outcome: Outcome | None = None
    """None if the run failed."""
    images: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Of each scored image, (N,): `correct` (bool), `nll` and `confidence` (float32)."""
    failure: Failure | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)
    """Versions, git revision, hardware, settings of determinism."""
    started: str = ""
    """ISO 8601, UTC."""
    seconds: float = 0.0

    @property
    def done(self) -> bool:
        """Whether there is an outcome."""
        return self.failure is None

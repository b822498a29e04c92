"""The record of a finished run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

import numpy as np

Kind = Literal["nan", "memory", "disk", "killed", "error"]
# Failures worth retrying; a NaN or an error in the code is reproducible.
TRANSIENT: tuple[Kind, ...] = ("memory", "disk", "killed")


class ValidationPoint(TypedDict):
    """The validation metrics after an epoch."""

    epoch: int
    accuracy: float
    """In percent."""
    nll: float


class SiteRate(TypedDict):
    """The mean requested rate and the dropped fraction of one site, in the measured forwards."""

    name: str
    asked: float
    dropped: float


class Outcome(TypedDict):
    """The result of a training run; JSON-serializable."""

    call: str
    """The injected regularizer or recipe with its rate; empty for none."""
    sites: int
    flags: list[str]
    """Warnings of the plan."""
    weights_before: str
    """SHA-256 of all parameters and buffers after initialization."""
    weights_after: str
    batches: list[str]
    """SHA-256 of the image indices of each epoch, in order."""
    first_loss: float
    train_loss: list[float]
    """Mean loss of each epoch."""
    validation: list[ValidationPoint]
    rates: list[tuple[int, float]]
    """(optimizer step, current rate), before the first epoch and after each; empty for none."""
    rate_at_end: float | None
    ramp_end: int | None
    """The first optimizer step with the rate within 1e-9 of its target; None if never, or for none."""
    asked: float | None
    """Mean requested rate over all sites and training forwards of the last epochs; None if nothing is dropped."""
    dropped: float | None
    realised: list[SiteRate]
    changes: list[str] | None
    """Differences in state_dict, repr or eval output with hooks or after `remove()`; None for none."""
    accuracy: float
    """In percent, after the last epoch, on the test images (validation images for a tuning run)."""
    nll: float
    ece: float
    """In percent, with 15 equal-width bins."""
    outputs: str
    """SHA-256 of the logits of the scored images."""
    data: str
    """SHA-256 of the image files; empty for images that are generated or belong to a library."""
    test_sets: list[str]
    """The test sets of `images["test_set"]`, which are reported separately; empty for a single one."""
    steps: int
    train_images: int
    scored_images: int
    skipped_images: int


@dataclass(frozen=True)
class Failure:
    """The reason why a run has no outcome."""

    kind: Kind
    message: str

    @property
    def transient(self) -> bool:
        """Whether the next start of the comparison retries the run."""
        return self.kind in TRANSIENT


@dataclass(frozen=True)
class Record:
    """The spec of a run with its outcome or failure."""

    key: str
    spec: Mapping[str, Any]
    """`Run.model_dump(mode="json")`."""
    outcome: Outcome | None = None
    """None if the run failed."""
    images: Mapping[str, np.ndarray] = field(default_factory=dict)
    """For each scored image: `correct` (bool), `nll` and `confidence` (float32), and with several test sets the index
    `test_set` (int64); each of shape (N,)."""
    failure: Failure | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)
    """Versions, git revision, hardware and determinism settings."""
    started: str = ""
    """ISO 8601, UTC."""
    seconds: float = 0.0

    @property
    def done(self) -> bool:
        """Whether the run succeeded."""
        return self.failure is None

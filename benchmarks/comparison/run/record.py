"""The record of a finished run, and the environment that it ran in."""

import os
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypedDict

import numpy as np
import torch

from program import machine_info

ROOT = Path(__file__).parents[3]


class Outcome(TypedDict):
    """The result of a training run; JSON-serializable."""

    call: str  # the injected regularizer or recipe with its rate; empty for none
    sites: int
    flags: list[str]  # warnings of the plan
    weights_before: str  # SHA-256 of all parameters and buffers after initialization
    weights_after: str
    batches: list[str]  # SHA-256 of the image indices of each epoch, in order
    first_loss: float
    train_loss: list[float]  # mean loss of each epoch
    rate_at_end: float | None
    asked: float | None  # mean requested rate over sites and training forwards of the last epochs; None: no drops
    dropped: float | None
    changes: list[str] | None  # in state_dict, repr or eval output with hooks or after `remove()`; None for none
    accuracy: float  # in percent, after the last epoch, on the test images (of a tuning run: validation images)
    nll: float
    ece: float  # in percent, with 15 equal-width bins
    outputs: str  # SHA-256 of the logits of the scored images
    data: str  # SHA-256 of the image files; empty for images that are generated or belong to a library
    test_sets: list[str]  # those of `images["test_set"]`, which are reported separately; empty for a single one
    steps: int
    train_images: int
    scored_images: int


@dataclass(frozen=True)
class Failure:
    """The reason why a run has no outcome."""

    kind: Literal["nan", "killed", "error"]
    """A `killed` worker's run is tried once more, `error` at the next start; `nan` is a result of the settings."""
    message: str


@dataclass(frozen=True)
class Record:
    """The spec of a run with its outcome or failure."""

    key: str
    spec: Mapping[str, Any]  # Run.model_dump(mode="json")
    outcome: Outcome | None = None  # None if the run failed
    images: Mapping[str, np.ndarray] = field(default_factory=dict)
    """For each scored image: `correct` (bool), `nll` and `confidence` (float32), its `label` (int64; not in old files),
    and with several test sets the index `test_set` (int64); each of shape (N,)."""
    failure: Failure | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)
    started: str = ""  # ISO 8601, UTC
    seconds: float = 0.0

    @property
    def done(self) -> bool:
        return self.failure is None


def environment() -> dict[str, Any]:
    """Hardware, versions and code revision, as JSON without host names, users or paths."""
    return {**machine_info("cuda" if torch.cuda.is_available() else "cpu"), "git": _revision()}


@cache
def _revision() -> str:
    """The commit of the code, and `-dirty` if it has uncommitted changes; empty without git."""
    # In a git hook, these variables name another repository.
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "--no-optional-locks", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40"]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run([*command, "--exclude=*"], capture_output=True, text=True, env=env, timeout=60)
        return done.stdout.strip()
    return ""

"""The record of a finished run, and the environment that it ran in."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, TypedDict

import numpy as np
import torch
from torch.utils import collect_env

import hookdrop

Kind = Literal["nan", "memory", "disk", "killed", "error"]
# Failures worth retrying; a NaN or an error in the code is reproducible.
TRANSIENT: tuple[Kind, ...] = ("memory", "disk", "killed")
ROOT = Path(__file__).parents[3]
PACKAGES = ("torchvision", "timm", "numpy", "scikit-learn")


class ValidationPoint(TypedDict):
    """The validation metrics after an epoch."""

    epoch: int
    accuracy: float  # in percent
    nll: float


class SiteRate(TypedDict):
    """The mean requested rate and the dropped fraction of one site, in the measured forwards."""

    name: str
    asked: float
    dropped: float


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
    validation: list[ValidationPoint]
    rates: list[tuple[int, float]]  # (optimizer step, rate), before the first epoch and after each; empty for none
    rate_at_end: float | None
    ramp_end: int | None  # the first step with the rate within 1e-9 of its target; None if never, or for none
    asked: float | None  # mean requested rate over sites and training forwards of the last epochs; None: no drops
    dropped: float | None
    realised: list[SiteRate]
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
    spec: Mapping[str, Any]  # Run.model_dump(mode="json")
    outcome: Outcome | None = None  # None if the run failed
    images: Mapping[str, np.ndarray] = field(default_factory=dict)
    """For each scored image: `correct` (bool), `nll` and `confidence` (float32), and with several test sets the index
    `test_set` (int64); each of shape (N,)."""
    failure: Failure | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)
    started: str = ""  # ISO 8601, UTC
    seconds: float = 0.0

    @property
    def done(self) -> bool:
        """Whether the run succeeded."""
        return self.failure is None


def environment() -> dict[str, Any]:
    """Versions, code revision, hardware and determinism settings, as JSON without host names, users or paths."""
    settings = {
        "threads": torch.get_num_threads(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cublas_workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }
    return {**_constant(), "determinism": settings}


@cache
def _constant() -> dict[str, Any]:
    versions = {"python": platform.python_version(), "torch": torch.__version__, "hookdrop": hookdrop.__version__}
    lines = (collect_env.run_and_read_all(collect_env.run, "lscpu") or "").splitlines()  # type: ignore[no-untyped-call]
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "versions": versions | {"cuda": torch.version.cuda} | {name: version(name) for name in PACKAGES},
        "git": revision(ROOT),
        "hardware": {
            "cpu": next((line.partition(":")[2].strip() for line in lines if "Model name" in line), "unknown"),
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "cpu_count": os.cpu_count(),
            "gpus": ", ".join(gpus) or "none",
        },
        "system": {"name": platform.system(), "machine": platform.machine()},
    }


def revision(root: Path) -> dict[str, Any]:
    """The commit of the code and whether it has uncommitted changes; None outside a checkout or without git."""
    # In a git hook, these variables name another repository.
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}

    def git(*arguments: str) -> str | None:
        command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    top, head = git("rev-parse", "--show-toplevel"), git("rev-parse", "HEAD")
    # If another repository contains the package, for example in a virtual environment, there is no revision.
    if top is None or head is None or Path(top).resolve() != root.resolve():
        return {"revision": None, "dirty": None}
    status = git("status", "--porcelain", "--", "hookdrop", "benchmarks")
    return {"revision": head, "dirty": None if status is None else bool(status)}

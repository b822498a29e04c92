"""The software, hardware and determinism settings of a run."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.utils import collect_env

import hookdrop

ROOT = Path(__file__).parents[3]
PACKAGES = ("torchvision", "timm", "numpy", "scikit-learn")
CODE = ("hookdrop", "benchmarks")


def environment() -> dict[str, Any]:
    """Versions, code revision, hardware and determinism settings, as JSON without host names, users or paths."""
    return {**_constant(), "determinism": determinism()}


def determinism() -> dict[str, Any]:
    """The settings of this process that affect bitwise reproducibility."""
    return {
        "threads": torch.get_num_threads(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cublas_workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }


@cache
def _constant() -> dict[str, Any]:
    versions = {"python": platform.python_version(), "torch": torch.__version__, "hookdrop": hookdrop.__version__}
    cpu = collect_env.run_and_read_all(collect_env.run, "lscpu") or ""  # type: ignore[no-untyped-call]
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "versions": versions | {"cuda": torch.version.cuda} | {name: version(name) for name in PACKAGES},
        "git": revision(ROOT),
        "hardware": {
            "cpu": next(
                (line.partition(":")[2].strip() for line in cpu.splitlines() if "Model name" in line), "unknown"
            ),
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "cpu_count": os.cpu_count(),
            "gpus": ", ".join(gpus) or "none",
        },
        "system": {"name": platform.system(), "machine": platform.machine()},
    }


def revision(root: Path) -> dict[str, Any]:
    """The commit of the code and whether it has uncommitted changes; None outside a checkout or without git."""
    top, head = _git(root, "rev-parse", "--show-toplevel"), _git(root, "rev-parse", "HEAD")
    # If another repository contains the package, for example in a virtual environment, there is no revision.
    if top is None or head is None or Path(top).resolve() != root.resolve():
        return {"revision": None, "dirty": None}
    status = _git(root, "status", "--porcelain", "--", *CODE)
    return {"revision": head, "dirty": None if status is None else bool(status)}


def _git(root: Path, *arguments: str) -> str | None:
    # In a git hook, these variables name another repository.
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None

"""The software, hardware and determinism settings of a run."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import hookdrop

ROOT = Path(__file__).parents[3]
PACKAGES = ("torchvision", "timm", "numpy", "scikit-learn", "optuna")
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
    return {"versions": versions(), "git": revision(ROOT), "hardware": hardware(), "system": _system()}


def versions() -> dict[str, str | None]:
    """Versions of Python and of each package; None if it is not installed."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "hookdrop": hookdrop.__version__}
    return found | {"cuda": torch.version.cuda} | {name: _version(name) for name in PACKAGES}


def revision(root: Path) -> dict[str, Any]:
    """The commit of the code and whether it has uncommitted changes; None outside a checkout or without git."""
    top = _git(root, "rev-parse", "--show-toplevel")
    head = _git(root, "rev-parse", "HEAD")
    # If another repository contains the package, for example in a virtual environment, there is no revision.
    if top is None or head is None or Path(top).resolve() != root.resolve():
        return {"revision": None, "dirty": None}
    status = _git(root, "status", "--porcelain", "--", *CODE)
    return {"revision": head, "dirty": None if status is None else bool(status)}


def hardware() -> dict[str, Any]:
    """CPU, memory and GPUs."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": _cpu(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cpu_count": os.cpu_count(),
        "memory_gib": _memory_gib(),
        "gpus": ", ".join(gpus) or "none",
    }


def _system() -> dict[str, str]:
    return {"name": platform.system(), "release": platform.release().split("-")[0], "machine": platform.machine()}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _git(root: Path, *arguments: str) -> str | None:
    # In a git hook, these variables name another repository.
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, OSError, ValueError):
        return None

"""The hardware and the versions that results depend on."""

from __future__ import annotations

import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision

import hookdrop
from hookdrop.kernels import native as kernel


def machine_info(device: str = "cpu") -> dict[str, Any]:
    """Describe the hardware and the software versions."""
    modules = [
        hookdrop,
        torch,
        torchvision,
        timm,
        *([sys.modules["transformers"]] if "transformers" in sys.modules else []),
    ]
    cpuinfo = Path("/proc/cpuinfo")
    model = re.search(r"^model name\s*: (.*)", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    return {
        "cpu": model[1].strip() if model else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "device": device if device == "cpu" else torch.cuda.get_device_name(),
        "threads": torch.get_num_threads(),
        "kernel": kernel.available(),
        "python": platform.python_version(),
        "versions": {module.__name__: module.__version__ for module in modules},
    }


def format_machine(found: dict[str, Any]) -> str:
    """Format `machine_info` as two lines."""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    where = "" if found["device"] == "cpu" else f", {found['device']}"
    built = "used" if found["kernel"] else "not built, or disabled by HOOKDROP_KERNEL=0"
    return (
        f"{found['cpu']}, {found['cores']} cores, {found['threads']} threads{where}; {versions}\n"
        f"hookdrop's compiled kernel: {built}."
    )

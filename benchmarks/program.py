"""What the programs share: the machine, tables, options, parts that run one after another, and results."""

import argparse
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import timm
import torch
import torchvision

import hookdrop
from hookdrop.accel import native

MIN_ROUNDS, QUICK_ROUNDS = 12, 3
Part = Callable[[argparse.Namespace], dict[str, Any]]
"""A part prints its tables and returns its results."""


def machine_info(device: str = "cpu") -> dict[str, Any]:
    """Describe the hardware and the software versions."""
    modules = [hookdrop, torch, torchvision, timm, sys.modules.get("transformers")]
    cpuinfo = Path("/proc/cpuinfo")
    model = re.search(r"^model name\s*: (.*)", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    return {
        "cpu": model[1].strip() if model else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "device": device if device == "cpu" else torch.cuda.get_device_name(),
        "threads": torch.get_num_threads(),
        "kernel": native.available(),
        "python": platform.python_version(),
        "versions": {module.__name__: module.__version__ for module in modules if module},
    }


def show(title: str, rows: Mapping[str, Mapping[str, object]]) -> None:
    """Print a table, given the cells of each row by column."""
    print(f"\n{title}\n{pd.DataFrame.from_dict(rows, orient='index').fillna('-').to_string()}")


def parser(description: str | None, parts: Mapping[str, Part], rounds: int, out: str) -> argparse.ArgumentParser:
    """Create a parser with the options that all programs have."""
    found = argparse.ArgumentParser(description=(description or "").partition(":")[0])
    add = found.add_argument
    add("--part", nargs="+", choices=[*parts], default=[*parts], help="what to measure (default: all)")
    add("--rounds", type=int, help=f"rounds of each measurement (default: {rounds})")
    add("--threads", type=int, default=2, help="PyTorch threads (default: 2)")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--quick", action="store_true", help=f"smoke test: {QUICK_ROUNDS} rounds of smaller tensors")
    add("--json", type=Path, default=Path(out), help="file of the results (default: %(default)s)")
    found.set_defaults(default_rounds=rounds)
    return found


def main(options: argparse.Namespace, parts: Mapping[str, Part], **fixed: object) -> int:
    """Run the parts, and write the results after each; the exit status does not depend on the results."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    options.rounds = options.rounds or (QUICK_ROUNDS if options.quick else options.default_rounds)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    machine = machine_info(options.device)
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()} | fixed
    results: dict[str, Any] = {"machine": machine, "settings": settings}
    note = " This is a smoke test: the numbers are not reliable." if options.rounds < MIN_ROUNDS else ""
    for name, value in machine.items():
        print(f"{name}: {', '.join(map(' '.join, value.items())) if isinstance(value, dict) else value}")
    print(f"{options.rounds} rounds in random order; see timing.py.{note}")
    for name in options.part:
        results[name] = parts[name](options)
        options.json.write_text(json.dumps(results, indent=1, allow_nan=False))
    print(f"Results: {options.json}")
    return 0

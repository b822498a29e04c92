"""Test and time hookdrop on a GPU, within 8 minutes: `make gpu`, or `python benchmarks/gpu.py`.

It runs the tests of the GPU kernels and the programs that time them, and writes a page to benchmarks/results/<device>.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from machine import format_machine, machine_info

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 480  # seconds
STEPS: dict[str, tuple[str, ...]] = {
    "tests": (
        *("-m", "pytest", "-q", "tests/unit/kernels/test_triton_dropblock.py"),
        *("tests/unit/kernels/test_no_synchronization.py", "tests/benchmarks/test_launches.py"),
    ),
    "launches": ("benchmarks/launches.py",),
    "speed": (
        *("benchmarks/speed.py", "--device", "cuda", "--part", "memory", "main", "small", "--rounds", "15"),
        *("--json", "{out}/results.json"),
    ),
    "train_step": (
        *("benchmarks/train_step.py", "--device", "cuda", "--part", "resnet", "compiled", "--batch", "128"),
        *("--rounds", "15", "--json", "{out}/train_step.json"),
    ),
}
"""What runs, in this order: arguments of Python, in which `{out}` is the folder of the results."""


class Result(NamedTuple):
    """How a step ended."""

    command: str
    status: str
    seconds: float
    output: str


def main(argv: Sequence[str] | None = None) -> int:
    """Run all steps; the exit status is 0 if all succeeded."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--out", type=Path, help="folder of the results (default: benchmarks/results/<device>)")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print(f"gpu: PyTorch {torch.__version__} finds no GPU; `make test` runs the kernels in Triton's interpreter.")
        return 1
    out = options.out or ROOT / "benchmarks" / "results" / folder_name(torch.cuda.get_device_name())
    return run(STEPS, out, format_machine(machine_info("cuda")))


def folder_name(device: str) -> str:
    """Return the name of a device in the form of the other folders: `nvidia-h200`."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def run(steps: Mapping[str, Sequence[str]], out: Path, machine: str, limit: float = LIMIT) -> int:
    """Run the steps one after another, and write the page after each, so that an interrupted run keeps its results."""
    out.mkdir(parents=True, exist_ok=True)
    end, results = time.monotonic() + limit, {}
    for name, command in steps.items():
        print(f"{name} ...", flush=True)
        results[name] = _run([part.format(out=out) for part in command], max(0.0, end - time.monotonic()))
        print(f"{name}: {results[name].status}, {results[name].seconds:.0f} s")
        (out / "README.md").write_text(page(machine, results))
    print(f"Results: {out / 'README.md'}")
    return int(any(result.status != "passed" for result in results.values()))


def _run(command: Sequence[str], limit: float) -> Result:
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "NO_COLOR": "1"}
    start = time.monotonic()
    output, status = "", "passed"
    try:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=limit,
        )
        output = done.stdout
        status = "passed" if done.returncode == 0 else f"failed (exit status {done.returncode})"
    except subprocess.TimeoutExpired as error:
        output = error.output.decode() if error.output else ""
        status = "stopped: the time is over"
    text = " ".join(["python", *command]).replace(f"{ROOT}{os.sep}", "")
    return Result(text, status, time.monotonic() - start, output.replace(f"{ROOT}{os.sep}", ""))


def page(machine: str, results: Mapping[str, Result]) -> str:
    """Return the page: the machine, a table of the steps, and the output of each."""
    rows = [f"| {name} | {result.status} | {result.seconds:.0f} s |" for name, result in results.items()]
    parts = [
        f"## {name}\n\n`{result.command}`\n\n```console\n{result.output.strip()}\n```"
        for name, result in results.items()
    ]
    table = "\n".join(["| step | result | time |", "|---|---|---|", *rows])
    head = f"# hookdrop on a GPU\n\nWritten by `make gpu`.\n\n```console\n{machine}\n```"
    return "\n\n".join([head, table, *parts]) + "\n"


if __name__ == "__main__":
    sys.exit(main())

"""Test and time hookdrop on a GPU, within 8 minutes: `make gpu`, or `python benchmarks/gpu.py`.

It runs the tests of the GPU kernels and the programs that time them, and writes a page to benchmarks/results/<device>.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from machine import format_machine, machine_info

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 480  # seconds
STEPS = {
    "tests": "-m pytest -q tests/unit/kernels/test_triton_dropblock.py tests/unit/kernels/test_no_synchronization.py "
    "tests/benchmarks/test_launches.py",
    "launches": "benchmarks/launches.py",
    "speed": "benchmarks/speed.py --device cuda --part memory main small --rounds 15 --json {out}/results.json",
    "train_step": "benchmarks/train_step.py --device cuda --part resnet compiled --batch 128 --rounds 15 "
    "--json {out}/train_step.json",
}
"""What runs, in this order: arguments of Python, in which `{out}` is the folder of the results."""


def main() -> int:
    """Run all steps; the exit status is 0 if all succeeded."""
    if not torch.cuda.is_available():
        print(f"gpu: PyTorch {torch.__version__} finds no GPU; `make test` runs the kernels in Triton's interpreter.")
        return 1
    out = ROOT / "benchmarks" / "results" / folder_name(torch.cuda.get_device_name())
    return run(STEPS, out, format_machine(machine_info("cuda")))


def folder_name(device: str) -> str:
    """Return the name of a device in the form of the other folders: `nvidia-h200`."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def run(steps: Mapping[str, str], out: Path, machine: str, limit: float = LIMIT) -> int:
    """Run the steps one after another, and add each to the page, so that an interrupted run keeps its results."""
    out.mkdir(parents=True, exist_ok=True)
    page, end, failed = out / "README.md", time.monotonic() + limit, 0
    page.write_text(f"# hookdrop on a GPU\n\nWritten by `make gpu`.\n\n```console\n{machine}\n```\n")
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
    settings = {"cwd": ROOT, "env": {**os.environ, "PYTHONPATH": path, "NO_COLOR": "1"}}
    for name, step in steps.items():
        print(f"{name} ...", flush=True)
        command, start = step.format(out=out), time.monotonic()
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "timeout": max(0.0, end - start)}
        try:
            done = subprocess.run([sys.executable, *shlex.split(command)], **settings, **pipes)
            output, status = done.stdout, f"failed (exit status {done.returncode})" if done.returncode else "passed"
        except subprocess.TimeoutExpired as error:
            output, status = error.output or b"", "stopped: the time is over"
        failed += status != "passed"
        result = f"{name}: {status}, {time.monotonic() - start:.0f} s"
        print(result)
        text = f"\n## {result}\n\n`python {command}`\n\n```console\n{output.decode().strip()}\n```\n"
        with page.open("a") as file:
            file.write(text.replace(f"{ROOT}{os.sep}", ""))
    print(f"Results: {page}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

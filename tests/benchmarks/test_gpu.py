"""`benchmarks/gpu.py` without a GPU: what it says, the page, and that its commands exist."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

import gpu
from tests.support.programs import ROOT


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """`make gpu` says it before it installs anything."""
    made = subprocess.run(["make", "gpu"], cwd=ROOT, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True)
    assert made.returncode != 0
    assert made.stdout == "make gpu: this machine has no GPU driver (neither nvidia-smi nor rocm-smi).\n"
    assert gpu.main() == 1
    assert capsys.readouterr().out.count("\n") == 1


def test_the_page_has_the_output_of_each_step(tmp_path: Path) -> None:
    steps = {
        "writes": "-c \"open(r'{out}/numbers.json', 'w').write('1'); print('fast')\"",
        "fails": "-c \"print('slow'); raise SystemExit(3)\"",
    }
    assert gpu.run(steps, tmp_path, "a machine") == 1
    assert (tmp_path / "numbers.json").read_text() == "1"
    page = (tmp_path / "README.md").read_text()
    for text in ("a machine", "## writes: passed, ", "## fails: failed (exit status 3), ", "\nfast\n", "\nslow\n"):
        assert text in page


def test_a_step_is_stopped_when_the_time_is_over(tmp_path: Path) -> None:
    assert gpu.run({"waits": '-c "import time; time.sleep(600)"', "never": '-c "1"'}, tmp_path, "", limit=0) == 1
    assert (tmp_path / "README.md").read_text().count("stopped: the time is over") == 2


@pytest.mark.parametrize("name", gpu.STEPS)
def test_the_commands_exist(name: str) -> None:
    """Their options are parsed before anything runs."""
    words = gpu.STEPS[name].split()
    files = [word for word in words if word.endswith(".py")]
    assert files
    assert all((ROOT / file).exists() for file in files)
    if name in ("speed", "train_step"):
        assert __import__(name).parse_options(words[1:]).device == "cuda"


def test_folders_are_named_after_the_device() -> None:
    assert gpu.folder_name("NVIDIA H200 (80 GB)") == "nvidia-h200-80-gb"

"""`benchmarks/calls.py`: calls and files stay within their limits, and so do the figures of the package's structure."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib

import pytest
from torch import nn

import calls
import hookdrop
from hookdrop.utils.validation import number
from tests.support.programs import ROOT


@pytest.mark.parametrize("action", calls.ACTIONS)
def test_calls_and_files_stay_within_their_limits(action: str) -> None:
    count, max_calls, max_files = calls.ACTIONS[action]
    found = count()
    assert 0 < found.total() <= max_calls, found
    assert max_files is None or len(calls.files(found)) <= max_files, found


def test_step_evaluates_the_schedule_once() -> None:
    assert calls.schedule_evaluations() == 1


def test_a_hook_has_no_listeners_in_steady_state() -> None:
    drop, model = calls.ramp(3)
    assert all(hook.listeners for hook in drop._sinks)
    for _ in range(2):
        drop.step()
        model(calls.torch.ones(2))
    assert [hook.listeners for hook in drop._sinks] == [()] * 3


def test_only_calls_in_the_package_are_counted() -> None:
    assert calls.count_calls(lambda: number(1.0, "p", "test")).total() == 1
    assert calls.count_calls(lambda: len([])).total() == 0


def members(kind: type) -> list[str]:
    return [name for name in dir(kind) if not name.startswith("_") and name not in dir(nn.Module)]


def test_figures_of_the_structure_stay_within_their_limits() -> None:
    package = ROOT / "hookdrop"
    texts = {str(file.relative_to(package)): file.read_text() for file in package.rglob("*.py")}
    assert len({name.split("/")[0] for name in texts}) <= 16
    assert sum(text.count("# type: ignore") for text in texts.values()) <= 20
    assert sum(len(text.splitlines()) for name, text in texts.items() if name.startswith("guards/")) <= 730
    assert len(members(hookdrop.Injection)) <= 22
    assert len(members(hookdrop.Regularizer)) <= 16
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert len(next(one["layers"] for one in contracts if one.get("containers") == ["hookdrop"])) <= 9
    command = [sys.executable, "-X", "importtime", "-c", "import hookdrop"]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stderr
    assert 40 < len(set(re.findall(r"\|\s+(hookdrop[\w.]*)$", loaded, flags=re.MULTILINE))) <= 65


def test_the_program_prints_the_numbers() -> None:
    done = subprocess.run([sys.executable, calls.__file__], capture_output=True, text=True, check=True)
    assert "inject with 1 site" in done.stdout

"""Python calls of a forward, a `step()` and an `inject`, and the figures of the package's structure, within their limits.

The counts use `sys.setprofile` on frames of the package, after warm-up calls. Unlike times, they are the same on every
machine. `pytest tests/benchmarks/test_calls.py -rP` prints them.
"""

import gc
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import hookdrop
from hookdrop import DropBlock, Dropout, Injection, LinearSchedule, Regularizer, inject
from tests.support.programs import ROOT

PACKAGE = str(Path(hookdrop.__file__).parent)
Calls = Counter[tuple[str, str]]
"""The calls of one action, by file and function."""


def count_calls(action: Callable[[], Any]) -> Calls:
    calls = Calls()

    def profile(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            calls[code.co_filename.removeprefix(PACKAGE + "/"), code.co_qualname] += 1

    gc.collect()  # what other tests left ends now
    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
    return calls


def forward(regularizer: Regularizer) -> Calls:
    """An eager training forward through one hooked layer, halfway through a ramp."""
    model = nn.Sequential(nn.Identity())
    inject(model, regularizer, layers="0", schedule=LinearSchedule(steps=10)).seek(5)
    x = torch.randn(8, 16, 14, 14, requires_grad=True)
    for _ in range(2):
        model(x)
    return count_calls(lambda: model(x))


def ramp(sites: int) -> tuple[Injection, nn.Module]:
    """An injection with a schedule after two steps, with the model, as it does not keep a reference to it."""
    model = nn.Sequential(*(nn.Identity() for _ in range(sites)))
    drop = inject(model, Dropout(0.1), layers="*", schedule=LinearSchedule(steps=1000))
    for _ in range(2):
        drop.step()
        model(torch.ones(2))
    return drop, model


def step() -> Calls:
    drop, _model = ramp(50)
    return count_calls(drop.step)


def injection() -> Calls:
    models, regularizer = [nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)], Dropout(0.1)
    for model in models[:2]:
        inject(model, Dropout(0.1), layers="0")
    return count_calls(lambda: inject(models[2], regularizer, layers="0"))


@pytest.mark.parametrize(
    ("action", "most", "files"),
    [
        pytest.param(lambda: forward(DropBlock(0.1, 3)), 37, 8, id="forward of one layer, DropBlock"),
        pytest.param(lambda: forward(Dropout(0.1)), 13, 4, id="forward of one layer, Dropout"),
        pytest.param(step, 84, 99, id="step() with 50 sites"),
        pytest.param(injection, 105, 17, id="inject with 1 site"),  # 103 and 16 without other recipes
    ],
)
def test_calls_and_files_stay_within_their_limits(action: Callable[[], Calls], most: int, files: int) -> None:
    found = action()
    print(f"{found.total()} calls, at most {most}; {len({file for file, _ in found})} files, at most {files}")
    assert 0 < found.total() <= most, found
    assert len({file for file, _ in found}) <= files, found


def test_step_evaluates_the_schedule_once_and_hooks_have_no_listeners_in_steady_state() -> None:
    drop, _model = ramp(3)
    calls = count_calls(drop.step)
    assert sum(count for (_, name), count in calls.items() if name == "LinearSchedule.__call__") == 1
    assert [hook.listeners for hook in drop._sinks] == [()] * 3


def members(kind: type) -> list[str]:
    return [name for name in dir(kind) if not name.startswith("_") and name not in dir(nn.Module)]


def test_figures_of_the_structure_stay_within_their_limits() -> None:
    package = ROOT / "hookdrop"
    texts = {str(file.relative_to(package)): file.read_text() for file in package.rglob("*.py")}
    assert len({name.split("/")[0] for name in texts}) <= 16
    assert sum(text.count("# type: ignore") for text in texts.values()) <= 15
    core = [text for name, text in texts.items() if name.startswith("core/")]
    assert len(core) <= 24
    assert sum(len(text.splitlines()) for text in core) <= 5010
    assert len(members(hookdrop.Injection)) <= 22
    assert len(members(hookdrop.Regularizer)) <= 16
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert len(next(one["layers"] for one in contracts if one.get("containers") == ["hookdrop"])) <= 9
    program = "import hookdrop, sys; print(*(m.__file__ for n, m in sys.modules.items() if n.startswith('hookdrop')))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    files = loaded.stdout.split()
    assert "accel/" not in loaded.stdout  # before a mask is drawn
    assert len(files) <= 44
    assert sum(len(Path(file).read_text().splitlines()) for file in files) <= 7260

"""Count the Python calls that hookdrop makes, and the files they are in: `python benchmarks/calls.py`.

The counts use `sys.setprofile` on frames of the package, on a CPU, after two warm-up calls. Unlike times, they are the
same on every machine; `tests/benchmarks/test_calls.py` asserts their limits.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import hookdrop
from hookdrop import DropBlock, Dropout, Injection, LinearSchedule, Regularizer, inject
from program import make_console, new_table

PACKAGE = str(Path(hookdrop.__file__).parent)
Calls = Counter[tuple[str, str]]
"""The calls of one action, by file and function."""


def count_calls(action: Callable[[], Any]) -> Calls:
    """Run `action` and count its calls of Python functions in the package."""
    calls = Calls()

    def profile(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            calls[code.co_filename.removeprefix(PACKAGE + "/"), code.co_qualname] += 1

    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
    return calls


def files(calls: Calls) -> set[str]:
    """Return the files of the functions."""
    return {file for file, _ in calls}


def forward(regularizer: Regularizer) -> Calls:
    """Count the calls of an eager training forward through one hooked layer, halfway through a ramp."""
    model = nn.Sequential(nn.Identity())
    inject(model, regularizer, layers="0", schedule=LinearSchedule(steps=10)).seek(5)
    x = torch.randn(8, 16, 14, 14, requires_grad=True)
    for _ in range(2):
        model(x)
    return count_calls(lambda: model(x))


def ramp(sites: int = 50) -> tuple[Injection, nn.Module]:
    """Create an injection with a schedule; keep a reference to the returned model, as the injection does not."""
    model = nn.Sequential(*(nn.Identity() for _ in range(sites)))
    return inject(model, Dropout(0.1), layers="*", schedule=LinearSchedule(steps=1000)), model


def step() -> Calls:
    """Count the calls of one `step()` with 50 sites."""
    drop, model = ramp()
    for _ in range(2):
        drop.step()
        model(torch.ones(2))
    return count_calls(drop.step)


def schedule_evaluations() -> int:
    """Count the schedule evaluations of one `step()` with 50 sites."""
    return sum(number for (_, name), number in step().items() if name == "LinearSchedule.__call__")


def injection() -> Calls:
    """Count the calls of `inject` with one site."""
    models, regularizer = [nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)], Dropout(0.1)
    for model in models[:2]:
        inject(model, Dropout(0.1), layers="0")
    return count_calls(lambda: inject(models[2], regularizer, layers="0"))


ACTIONS: dict[str, tuple[Callable[[], Calls], int, int | None]] = {
    "forward of one layer, DropBlock": (partial(forward, DropBlock(0.1, 3)), 40, 9),
    "forward of one layer, Dropout": (partial(forward, Dropout(0.1)), 14, 5),
    "step() with 50 sites": (step, 83, None),
    "inject with 1 site": (injection, 88, 18),
}
"""By name: the function that counts, and the maximum numbers of calls and files."""


def main() -> None:
    """Print a table."""
    table = new_table("", "action", "calls", "maximum", "files", "maximum ")
    for name, (action, *limits) in ACTIONS.items():
        calls = action()
        most = ["-" if limit is None else str(limit) for limit in limits]
        table.add_row(name, str(calls.total()), most[0], str(len(files(calls))), most[1])
    table.add_row("schedule evaluations in step() with 50 sites", str(schedule_evaluations()), "1", "-", "-")
    make_console().print(table)


if __name__ == "__main__":
    main()

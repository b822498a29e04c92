"""How many Python calls hookdrop makes, and in how many of its files: `python benchmarks/calls.py`.

Counted with `sys.setprofile` over frames of the package, on a CPU, after two warm-up calls. Unlike times, these numbers
are the same on every machine; `tests/benchmarks/test_calls.py` holds each to its limit.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.table import Table
from torch import nn

import hookdrop
from hookdrop import DropBlock, Dropout, Injection, LinearSchedule, Regularizer, inject
from terminal import make_console

PACKAGE = str(Path(hookdrop.__file__).parent)


@dataclass(frozen=True)
class Count:
    """The calls of one action, by function and by file."""

    functions: Counter[str]
    files: Counter[str]

    @property
    def calls(self) -> int:
        return self.functions.total()


def counted(action: Callable[[], Any]) -> Count:
    """Run `action` and count the calls of Python functions in the package."""
    count = Count(Counter(), Counter())

    def profile(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            file = code.co_filename.removeprefix(PACKAGE + "/")
            count.files[file] += 1
            count.functions[f"{file}:{code.co_qualname}"] += 1

    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


def forward(regularizer: Regularizer) -> Count:
    """An eager training forward through one hooked layer, halfway up a ramp."""
    model = nn.Sequential(nn.Identity())
    drop = inject(model, regularizer, layers="0", schedule=LinearSchedule(steps=10))
    drop.seek(5)
    x = torch.randn(8, 16, 14, 14, requires_grad=True)
    for _ in range(2):
        model(x)
    return counted(lambda: model(x))


def ramp(sites: int = 50) -> tuple[Injection, nn.Module]:
    """An injection with a schedule at many sites, and its model, which must be kept."""
    model = nn.Sequential(*(nn.Identity() for _ in range(sites)))
    return inject(model, Dropout(0.1), layers="*", schedule=LinearSchedule(steps=1000)), model


def step() -> Count:
    """One `step()` of an injection with 50 sites."""
    drop, model = ramp()
    for _ in range(2):
        drop.step()
        model(torch.ones(2))
    return counted(drop.step)


def schedule_evaluations() -> int:
    """How often one `step()` with 50 sites evaluates the schedule."""
    return sum(number for name, number in step().functions.items() if name.endswith("_Ramp.__call__"))


def injection() -> Count:
    """`inject` with one site."""
    models = [nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)]
    for model in models[:2]:
        inject(model, Dropout(0.1), layers="0")
    regularizer = Dropout(0.1)
    return counted(lambda: inject(models[2], regularizer, layers="0"))


ACTIONS: dict[str, tuple[Callable[[], Count], int, int | None]] = {
    "forward of one layer, DropBlock": (lambda: forward(DropBlock(0.1, 3)), 45, 9),
    "forward of one layer, Dropout": (lambda: forward(Dropout(0.1)), 25, 7),
    "step() with 50 sites": (step, 300, None),
    "inject with 1 site": (injection, 90, 15),
}
"""By what is done: the count, and the most calls and files that are allowed."""


def main() -> None:
    """Print a table, and with `--functions` where the calls go."""
    table = Table("action", "calls", "at most", "files", "at most ")
    for name, (action, calls, files) in ACTIONS.items():
        count = action()
        table.add_row(name, str(count.calls), str(calls), str(len(count.files)), "-" if files is None else str(files))
        if "--functions" in sys.argv[1:]:
            for function, number in count.functions.most_common():
                print(f"{number:5} {function}")
    table.add_row("evaluations of the schedule in that step()", str(schedule_evaluations()), "1", "-", "-")
    make_console().print(table)


if __name__ == "__main__":
    main()

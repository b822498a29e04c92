"""The progress of a comparison, in a terminal or a pipe."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from comparison.report.numbers import duration
from comparison.run.record import Record
from terminal import say

LINES = 10
"""Total number of progress lines in a pipe."""


@contextmanager
def watch(console: Console, total: int) -> Iterator[Callable[[Record], None]]:
    """Yield a callback for finished runs: a progress bar; in a pipe, a line for every 10 % of the runs."""
    parts: tuple[ProgressColumn, ...] = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("runs{task.description},"),
        TimeElapsedColumn(),
    )
    parts = (*parts, TextColumn("done,"), TimeRemainingColumn(), TextColumn("left"))
    bar = Progress(*parts, console=console, disable=not console.is_terminal)
    task, failed, started = bar.add_task("", total=total), 0, time.perf_counter()

    def advance(record: Record) -> None:
        nonlocal failed
        failed += not record.done
        bar.update(task, advance=1, description=f" ({failed} failed)" if failed else "")
        done = int(bar.tasks[0].completed)
        # Print when another 10 % is complete; 10 % need not be an integer number of runs.
        if not console.is_terminal and done * LINES // total > (done - 1) * LINES // total:
            say(console, line(done, total, failed, time.perf_counter() - started))

    with bar:
        yield advance


def line(done: int, total: int, failed: int, seconds: float) -> str:
    """Format progress, such as `30 of 100 runs (1 failed) after 60 s, about 2 min left`."""
    text = f"{done} of {total} runs{f' ({failed} failed)' if failed else ''} after {duration(seconds)}"
    # The first run includes the start-up time of its process.
    if done == total or done == 1:
        return text
    return f"{text}, about {duration(seconds / done * (total - done))} left"

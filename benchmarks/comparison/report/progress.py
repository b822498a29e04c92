"""The progress of a comparison, in a terminal or a pipe."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from comparison.engines.store import Beat, Store
from comparison.run.record import Record
from terminal import say

LINES = 10
"""Total number of progress lines in a pipe."""

Advance = Callable[[Record], None]
"""A callback for the record of each finished run."""


@contextmanager
def watch(console: Console, total: int, store: Store) -> Iterator[Advance]:
    """Show a progress bar and a line for each active run; in a pipe, print a line for every 10 % of the runs."""
    with (_bar if console.is_terminal else _lines)(console, total, store) as advance:
        yield advance


@contextmanager
def _bar(console: Console, total: int, store: Store) -> Iterator[Advance]:
    parts = (BarColumn(), MofNCompleteColumn(), TextColumn("runs{task.description},"), TimeElapsedColumn())
    bar = Progress(*parts, TextColumn("done,"), TimeRemainingColumn(), TextColumn("left"), console=console)
    task = bar.add_task("", total=total)
    failed = 0

    def advance(record: Record) -> None:
        nonlocal failed
        failed += not record.done
        bar.update(task, advance=1, description=f" ({failed} failed)" if failed else "")

    with Live(get_renderable=lambda: Group(bar, *active_runs(store)), console=console, refresh_per_second=2):
        yield advance


def active_runs(store: Store) -> list[RenderableType]:
    """A line for each active run."""
    return [Text(_describe(beat), no_wrap=True, overflow="ellipsis") for beat in store.beats().values()]


def _describe(beat: Beat) -> str:
    loss = "" if beat.loss is None else f", loss {beat.loss:.4f}"
    return f"  {beat.label}: step {beat.step} of {beat.steps}{loss}"


@contextmanager
def _lines(console: Console, total: int, store: Store) -> Iterator[Advance]:
    done, failed, started = 0, 0, time.perf_counter()

    def advance(record: Record) -> None:
        nonlocal done, failed
        done, failed = done + 1, failed + (not record.done)
        # Print when another 10 % is complete; 10 % need not be an integer number of runs.
        if done * LINES // total > (done - 1) * LINES // total:
            say(console, line(done, total, failed, time.perf_counter() - started))

    yield advance


def line(done: int, total: int, failed: int, seconds: float) -> str:
    """Format progress, such as `30 of 100 runs (1 failed) after 60 s, about 2 min left`."""
    text = f"{done} of {total} runs{f' ({failed} failed)' if failed else ''} after {format_duration(seconds)}"
    # The first run includes the start-up time of its process.
    if done == total or done == 1:
        return text
    return f"{text}, about {format_duration(seconds / done * (total - done))} left"


def format_duration(seconds: float) -> str:
    """Format a duration in the largest unit that gives at least 2."""
    for unit, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.1f} {name}" if unit > 60 else f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s"

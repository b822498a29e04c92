"""How far a comparison has come, in a terminal and in a pipe."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from comparison.engines.store import Beat, Store, StoreError
from comparison.run.record import Record
from terminal import say

LINES = 10
"""In a pipe, for all runs."""

Advance = Callable[[Record], None]
"""To be called with the record of each run that ended."""


@contextmanager
def watch(console: Console, total: int, store: Store) -> Iterator[Advance]:
    """A bar with the time left and a line for each run that goes on; in a pipe, a line after every tenth of runs."""
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

    with Live(get_renderable=lambda: Group(bar, *going_on(store)), console=console, refresh_per_second=2):
        yield advance


def going_on(store: Store) -> list[RenderableType]:
    """A line for each run that goes on."""
    beats: list[Beat] = []
    # Nothing is lost if it can't be read just now.
    with suppress(StoreError):
        beats = list(store.beats().values())
    return [Text(_said(beat), no_wrap=True, overflow="ellipsis") for beat in beats]


def _said(beat: Beat) -> str:
    loss = "" if beat.loss is None else f", loss {beat.loss:.4f}"
    return f"  {beat.label}: step {beat.step} of {beat.steps}{loss}"


@contextmanager
def _lines(console: Console, total: int, store: Store) -> Iterator[Advance]:
    done, failed, started = 0, 0, time.perf_counter()

    def advance(record: Record) -> None:
        nonlocal done, failed
        done, failed = done + 1, failed + (not record.done)
        # Another tenth is complete, though a tenth may be no whole number of runs.
        if done * LINES // total > (done - 1) * LINES // total:
            say(console, line(done, total, failed, time.perf_counter() - started))

    yield advance


def line(done: int, total: int, failed: int, seconds: float) -> str:
    """As in `30 of 100 runs (1 failed) after 60 s, about 2 min left`; `seconds` since the first began."""
    text = f"{done} of {total} runs{f' ({failed} failed)' if failed else ''} after {spell(seconds)}"
    # The first runs have waited for their processes to start.
    return text if done == total or done == 1 else f"{text}, about {spell(seconds / done * (total - done))} left"


def spell(seconds: float) -> str:
    """A duration in the largest unit of which there are two or more."""
    for unit, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.1f} {name}" if unit > 60 else f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s"

"""What is printed, in a terminal and in a pipe."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

# No row of the table is cut or broken at this width.
PIPE_WIDTH = 130


def make_console() -> Console:
    """As wide as the terminal; in a pipe, wide enough for the table."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPE_WIDTH)


def say(console: Console, text: str) -> None:
    """Print plain text; brackets in it are no markup, and lines stay whole in a pipe."""
    console.print(text, markup=False, soft_wrap=not console.is_terminal)


@contextmanager
def progress(console: Console, total: int) -> Iterator[Callable[[], None]]:
    """A function to call after each run: a bar with the time left, or in a pipe a line for every tenth run."""
    if console.is_terminal:
        parts = (BarColumn(), MofNCompleteColumn(), TextColumn("runs,"), TimeElapsedColumn(), TextColumn("done,"))
        with Progress(*parts, TimeRemainingColumn(), TextColumn("left"), console=console) as bar:
            task = bar.add_task("", total=total)
            yield lambda: bar.advance(task)
        return
    done, started = 0, time.perf_counter()

    def advance() -> None:
        nonlocal done
        done += 1
        if done % 10 == 0 or done == total:
            say(console, f"{done} of {total} runs after {time.perf_counter() - started:.0f} s")

    yield advance

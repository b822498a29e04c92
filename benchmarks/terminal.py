"""What is printed, in a terminal and in a pipe."""

from __future__ import annotations

from rich.console import Console

# No row of the table is cut or broken at this width.
PIPE_WIDTH = 130


def make_console() -> Console:
    """As wide as the terminal; in a pipe, wide enough for the table."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPE_WIDTH)


def say(console: Console, text: str) -> None:
    """Print plain text; brackets in it are no markup, and lines stay whole in a pipe."""
    console.print(text, markup=False, soft_wrap=not console.is_terminal)

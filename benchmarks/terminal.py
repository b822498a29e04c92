"""Console output for terminals and pipes."""

from __future__ import annotations

from rich.console import Console

# Wide enough that no table row is truncated or wrapped.
PIPE_WIDTH = 130


def make_console() -> Console:
    """Create a console as wide as the terminal, or `PIPE_WIDTH` wide in a pipe."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPE_WIDTH)


def say(console: Console, text: str) -> None:
    """Print plain text without interpreting markup, and without wrapping lines in a pipe."""
    console.print(text, markup=False, soft_wrap=not console.is_terminal)

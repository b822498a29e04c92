"""Terminal output of the commands."""

from __future__ import annotations

from collections.abc import Sequence

from hookdrop.utils.optional import needs
from hookdrop.utils.tables import text_table

ROOT = "(the model)"


class Output:
    """Text and tables for a terminal or a pipe."""

    def __init__(self) -> None:
        with needs("cli"):
            from rich.console import Console
        self._console = Console(markup=False, highlight=False, emoji=False)

    def line(self, text: str, style: str = "") -> None:
        """Print a line."""
        # soft_wrap keeps lines whole, so they can be copied from a terminal and parsed in a pipe.
        self._console.print(text, style=style or None, soft_wrap=True)

    def table(self, header: Sequence[str], rows: Sequence[Sequence[object]], dim: list[bool]) -> None:
        """Print a table without its empty columns."""
        used = [i for i in range(len(header)) if any(row[i] not in ("", None) for row in rows)]
        table = text_table([header[i] for i in used], [[row[i] for i in used] for row in rows])
        styles = ["bold", "dim", *("dim" if is_dim else "" for is_dim in dim)]
        for line, style in zip(table.splitlines(), styles, strict=True):
            self.line(line, style)

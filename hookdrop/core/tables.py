"""Plain-text and HTML tables."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


def text_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    # The first column holds names, which may look like numbers.
    right = [i > 0 and all(_is_number(row[i]) for row in cells) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        padded = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True))
        return "  ".join(padded).rstrip()

    return "\n".join([line(header), line(["-" * width for width in widths]), *map(line, cells)])


def html_table(header: Sequence[str], rows: Sequence[Sequence[object]], caption: str, notes: Sequence[str] = ()) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(_cell(value))}</td>" for value in row) + "</tr>" for row in rows)
    below = "".join(f"<p>{escape(note)}</p>" for note in notes)
    return f"<table><caption>{escape(caption)}</caption><tr>{head}</tr>{body}</table>{below}"


def shape_text(shape: Sequence[int] | None) -> str:
    """Format `(2, 64, 56, 56)` as `2x64x56x56`, and an unknown shape as `?`."""
    return "?" if shape is None else "x".join(map(str, shape)) or "()"


def counted(count: int, noun: str) -> str:
    """Format a count with its noun: `1 site`, `2 sites`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def some(names: Sequence[str]) -> str:
    """Quote the first names and count the rest: `'a', 'b', 'c', 'd' and 3 more`."""
    shown = names if len(names) <= 5 else names[:4]
    more = f" and {len(names) - 4} more" if len(names) > 5 else ""
    return ", ".join(map(repr, shown)) + more


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def _is_number(text: str) -> bool:
    digits = text.removeprefix("-").replace(".", "", 1).replace("e-", "", 1).replace("e+", "", 1)
    return digits.isdigit() or text in ("-", "nan", "inf", "-inf")

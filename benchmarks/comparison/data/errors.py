"""What the data's errors are."""

from __future__ import annotations


class DataError(ValueError):
    """Data that can't be had, or that can't be split as asked; its text says what to do."""

    def __init__(self, fact: str, *lines: str) -> None:
        super().__init__("\n".join([fact, *(f"  {line}" for line in lines), "Nothing was trained."]))


def in_full(number: int) -> str:
    """As in `10,000`."""
    return f"{number:,}"

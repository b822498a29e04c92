"""What is wrong with what was asked for, said before anything is trained."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class ConfigError(ValueError):
    """A comparison that can't be made as it was asked for; nothing was trained."""


def nearest(name: str, known: Iterable[str], most: int = 3) -> list[str]:
    """The known names that look most like a name, best first; none if none does."""
    spelled = {one.lower(): one for one in known}
    return [spelled[close] for close in get_close_matches(name.lower(), spelled, n=most, cutoff=0.5)]


def or_nearest(name: str, known: Iterable[str]) -> str:
    """A line that offers the nearest of the known names, or lists them if none is near."""
    known = list(known)
    if close := nearest(name, known):
        return f"  did you mean: {', '.join(close)}"
    return f"  there are:    {', '.join(known[:20])}{' ...' if len(known) > 20 else ''}"

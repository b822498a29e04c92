"""Errors in the request, raised before training starts."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class ConfigError(ValueError):
    """An invalid comparison; nothing was trained."""


def nearest(name: str, known: Iterable[str], most: int = 3) -> list[str]:
    """The known names closest to a name, best first; empty if none is close."""
    by_lower = {one.lower(): one for one in known}
    return [by_lower[close] for close in get_close_matches(name.lower(), by_lower, n=most, cutoff=0.5)]


def suggest(name: str, known: Iterable[str]) -> str:
    """A line with the closest known names, or with all of them if none is close."""
    known = list(known)
    if close := nearest(name, known):
        return f"  did you mean: {', '.join(close)}"
    return f"  available:    {', '.join(known[:20])}{' ...' if len(known) > 20 else ''}"

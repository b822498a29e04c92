"""Parts outside of the core, by name: `"hookdrop.survey.facts:survey"` is imported when it is first used.

The core imports no other folder of the package. `hookdrop/__init__.py` registers here what it calls.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

KINDS: dict[str, str] = dict.fromkeys(("output", "input"), "hookdrop.core.hook:SiteHook")
"""The class that drives the sites of each kind: where they are (`at`), or what their regularizer needs."""

PARTS: dict[str, str] = {}
"""What functions of the core delegate to."""


@cache
def load(place: str) -> Any:
    """Import `"module:name"`."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def part(name: str) -> Any:
    return load(PARTS[name])


def kind(name: str) -> Any:
    """Return the class of sinks for a kind of site."""
    return load(KINDS[name])

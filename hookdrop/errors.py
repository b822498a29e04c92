"""What hookdrop raises and warns with."""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

UNCHANGED = "No hook was placed; the model is unchanged."


class HookdropError(Exception):
    """The base of hookdrop's own errors."""


class LayerError(HookdropError, ValueError):
    """A layer was asked for that the model does not have, or that can't carry a hook."""


class ShapeError(HookdropError, ValueError):
    """A tensor has a shape that the regularizer would misread."""


class InjectionError(HookdropError, RuntimeError):
    """An injection can't be made or used in the state that the model or the handle is in."""


class StateError(HookdropError, ValueError):
    """A saved state does not fit, or a setting can't be saved."""


class HookdropWarning(UserWarning):
    """Something that works but is probably not what was meant."""


# People read and catch `hookdrop.LayerError`: that is the name that tracebacks show.
for _class in (HookdropError, LayerError, ShapeError, InjectionError, StateError, HookdropWarning):
    _class.__module__ = "hookdrop"


def nearest(text: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The known names most like `text`, best first."""
    return difflib.get_close_matches(text, list(known), n=count, cutoff=0.5)


def did_you_mean(text: str, known: Iterable[str], count: int = 3) -> str:
    """A line of a message with the known names most like `text`; empty if there are none."""
    near = nearest(text, known, count)
    return f"\n  did you mean: {', '.join(map(repr, near))}" if near else ""


def warn(message: str) -> None:
    """A `HookdropWarning` that points at the line of the caller outside of hookdrop."""
    frame, depth = sys._getframe(1), 2
    # A warning from a hook comes through torch's frames too.
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in ("hookdrop", "contextlib", "torch"):
        frame, depth = frame.f_back, depth + 1
    warnings.warn(message, HookdropWarning, stacklevel=depth)


@contextmanager
def nothing_placed() -> Iterator[None]:
    """Errors that leave this block say that the model is as it was."""
    try:
        yield
    except (HookdropError, TypeError, ValueError) as error:
        if len(error.args) == 1 and isinstance(error.args[0], str) and UNCHANGED not in error.args[0]:
            error.args = (f"{error.args[0]}\n{UNCHANGED}",)
        raise

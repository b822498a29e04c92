"""Errors and warnings raised by hookdrop."""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

UNCHANGED = "No hook was placed; the model is unchanged."


class HookdropError(Exception):
    """Base class of all hookdrop errors."""


class LayerError(HookdropError, ValueError):
    """A requested layer does not exist in the model or cannot carry a hook."""


class ShapeError(HookdropError, ValueError):
    """A tensor has a shape that the regularizer would misinterpret."""


class InjectionError(HookdropError, RuntimeError):
    """The current state of the model or the handle does not allow the operation."""


class StateError(HookdropError, ValueError):
    """A saved state does not match the injection, or a setting cannot be saved."""


class NotRecordedError(LayerError, KeyError):
    """Nothing was recorded for the requested layer. A `KeyError`, as of a dict, but with a readable message."""

    __str__ = Exception.__str__


class MissingPackageError(HookdropError, ModuleNotFoundError):
    """A package of an extra is not installed."""


class HookdropWarning(UserWarning):
    """The code runs but probably does not do what was intended."""


# Tracebacks show `hookdrop.LayerError`, the name that users import and catch.
for _class in (HookdropError, LayerError, ShapeError, InjectionError, StateError, HookdropWarning):
    _class.__module__ = "hookdrop"


def nearest(text: str, known: Iterable[str]) -> list[str]:
    """Return the known names closest to `text`, best match first."""
    return difflib.get_close_matches(text, list(known), cutoff=0.5)


def did_you_mean(text: str, known: Iterable[str]) -> str:
    """Return a message line that suggests the known names closest to `text`, or an empty string."""
    near = nearest(text, known)
    return f"\n  did you mean: {', '.join(map(repr, near))}" if near else ""


def warn(message: str) -> None:
    """Issue a `HookdropWarning` attributed to the calling line outside hookdrop."""
    frame, depth = sys._getframe(1), 2
    # Warnings from a hook pass through torch's frames too.
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in ("hookdrop", "contextlib", "torch"):
        frame, depth = frame.f_back, depth + 1
    warnings.warn(message, HookdropWarning, stacklevel=depth)


@contextmanager
def nothing_placed() -> Iterator[None]:
    """Append "No hook was placed" to errors that leave this block."""
    try:
        yield
    except (HookdropError, TypeError, ValueError) as error:
        if len(error.args) == 1 and isinstance(error.args[0], str) and UNCHANGED not in error.args[0]:
            error.args = (f"{error.args[0]}\n{UNCHANGED}",)
        raise

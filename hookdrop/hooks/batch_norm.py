"""Detect that batch-norm statistics are collected while hooks drop, which makes them those of dropped activations."""

from __future__ import annotations

import sys
from types import FrameType

_COLLECTORS = frozenset({"update_bn", "bn_update", "update_bn_stats"})
"""The functions that collect them: of PyTorch, of the authors of SWA, and of fvcore and mmengine. Many projects copied
one of them, so they are recognized by name."""


def collects_statistics() -> bool:
    """Whether one of these functions is among the callers.

    Nothing else distinguishes its forwards from those of a reentrant checkpoint or of a momentum encoder, which also
    run in training mode without gradients.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name not in _COLLECTORS:
        frame = frame.f_back
    return frame is not None


def dropped_statistics_text(name: str) -> str:
    """The warning for statistics that are collected while an injection drops."""
    return (
        f"{name!r} drops activations while batch-norm statistics are collected, so these are wrong for eval mode.\n"
        "  collect them with hookdrop.update_bn(loader, model), or inside: with hookdrop.find(model).disabled(): ..."
    )

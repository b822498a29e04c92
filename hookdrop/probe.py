"""Proof that an injection is active: a few forwards that leave no trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hookdrop.arguments import count
from hookdrop.hooks import SiteHook, State, hidden
from hookdrop.meter import Measurement, SiteMeasurement
from hookdrop.preserve import call, preserved
from hookdrop.values import tensors
from hookdrop.wrappers import unwrapped


def probe(model: nn.Module, state: State, hooks: Sequence[SiteHook], x: Any, forwards: int) -> Measurement:
    """Measure `forwards` train-mode forwards on `x`, and compare eval output with hooks and without."""
    forwards = count(forwards, "forwards", "probe")
    inner = unwrapped(model)
    result = empty_measurement(hooks)
    marks = [(hook.fired, hook.trained, hook.undriven) for hook in hooks]
    outer, state.meter = state.meter, None
    try:
        with preserved(model), torch.no_grad():
            result.eval_identical = _eval_identical(inner, x)
            state.meter = result
            inner.train()
            for _ in range(forwards):
                call(inner, x)
    finally:
        state.meter = outer
        for hook, mark in zip(hooks, marks, strict=True):
            hook.fired, hook.trained, hook.undriven = mark
    result.note = _note(state, result)
    return result


def empty_measurement(hooks: Sequence[SiteHook]) -> Measurement:
    """A measurement with a row for each site."""
    return Measurement({hook.site: SiteMeasurement() for hook in hooks})


def _eval_identical(model: nn.Module, x: Any) -> bool:
    for module in model.modules():
        module.training = False
    with preserved(model):
        regularized = tensors(call(model, x))
    with preserved(model), hidden(model):
        clean = tensors(call(model, x))
    return len(clean) == len(regularized) and all(map(_same, clean, regularized))


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def _note(state: State, result: Measurement) -> str:
    if not state.on:
        return f"{state.name!r} is disabled: drop.enable()"
    if result.calls:
        return ""
    if state.schedule(state.step_count) == 0.0:
        return (
            f"nothing was dropped: the rate is 0 at step {state.step_count} of {state.schedule}; "
            "probe(x, step=...) looks further along"
        )
    return "nothing was dropped: no site was called in training mode at a rate above 0"

"""What the first calls of a hook show: that its layer runs, in which mode, and with what shape."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from hookdrop.diagnostics.rank_seeds import announce
from hookdrop.hooks.checkpointing import CheckpointedRates
from hookdrop.hooks.hook import SiteHook, first_listeners
from hookdrop.hooks.registry import hooks_of


def note_call(hook: SiteHook, module: nn.Module, value: Any) -> None:
    """Note that a layer ran; once it has run in training mode there is nothing left to note."""
    hook.called = True
    if module.training:
        hook.trained = hook.state.live.trained = True
        hook.unsubscribe(note_call)


def check_first_shape(hook: SiteHook, module: nn.Module, value: Any) -> None:
    """Check the shape of the first tensor at any rate: better now than at step 1,000 of a ramp."""

    def check(x: Tensor) -> Tensor:
        hook.regularizer.check(x.shape)
        # A symbol (make_fx) holds the trace that it belongs to, which can be neither copied nor pickled.
        if all(type(size) is int for size in x.shape):
            hook.last_shape = x.shape
            warn_about_shape(hook)
        # From the first mask on, the ranks of a job know one another's seeds.
        announce(x.device)
        return x

    if (hook.train_rate if module.training else hook.eval_rate) is not None:
        hook.edit(module, value, check)


def warn_about_shape(hook: SiteHook) -> None:
    """Warn about the last shape, once. A compiled graph cannot raise warnings, so its shapes wait for the next step."""
    hook.unsubscribe(check_first_shape)
    for kind, text in shape_warnings(hook).items():
        hook.state.warn_once(kind, text)


def shape_warnings(hook: SiteHook) -> dict[str, str]:
    """What is probably not meant of the last shape, by kind: fifty blocks of one kind say the same."""
    found = [] if hook.last_shape is None else hook.regularizer.shape_warnings(hook.last_shape)
    see_all = "\n  all sites: print(plan(..., example_input=x))"
    return {re.sub(r"\d+", "#", text): f"{hook.where}: {text}{see_all}" for text in found}


def is_unchecked(hook: SiteHook) -> bool:
    """Whether no warning about a shape was given yet."""
    return check_first_shape in hook.listeners


@contextmanager
def without_bookkeeping(model: nn.Module) -> Iterator[None]:
    """The forwards inside leave no mark on any hook: not that it ran, nor in which mode."""
    hooks = [hook for _, hook in hooks_of(model)]
    before = [(hook.called, hook.trained, hook.last_shape, hook.listeners) for hook in hooks]
    lives = {hook.state.live: (hook.state.live.checkpointed, hook.state.live.trained) for hook in hooks}
    for hook in hooks:
        hook.called = hook.trained = False
        hook.listeners = (note_call, check_first_shape) if is_unchecked(hook) else (note_call,)
    for live in lives:
        live.checkpointed = CheckpointedRates()
    try:
        yield
    finally:
        for hook, mark in zip(hooks, before, strict=True):
            hook.called, hook.trained, hook.last_shape, hook.listeners = mark
        for live, kept in lives.items():
            live.checkpointed, live.trained = kept


first_listeners += [note_call, check_first_shape]

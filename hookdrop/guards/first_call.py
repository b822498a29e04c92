"""Listeners for the first calls of a hook: whether its layer runs, in which mode, and with which shape."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from hookdrop.hooks.checkpointing import CheckpointedCalls
from hookdrop.hooks.hook import SiteHook, first_listeners
from hookdrop.hooks.registry import hooks_of
from hookdrop.utils.seeding import announce


def note_call(hook: SiteHook, module: nn.Module, value: Any) -> None:
    """Record that a layer ran. Unsubscribes once the layer has run in training mode."""
    hook.called = True
    if module.training:
        hook.trained = hook.state.live.trained = True
        hook.unsubscribe(note_call)


def check_first_shape(hook: SiteHook, module: nn.Module, value: Any) -> None:
    """Check the shape of the first tensor, even if the rate is still 0: a ramp would otherwise fail much later."""

    def check(x: Tensor, **context: Any) -> Tensor:
        hook.regularizer.check(x.shape)
        # A symbolic size (make_fx) references its trace, which can be neither copied nor pickled.
        if all(type(size) is int for size in x.shape):
            hook.last_shape = x.shape
            warn_about_shape(hook)
        # Ranks announce their seeds when they draw their first masks.
        announce(x.device)
        return x

    if (hook.train_rate if module.training else hook.eval_rate) is not None:
        hook.edit(module, value, check)


def warn_about_shape(hook: SiteHook) -> None:
    """Warn about the last shape, once. Compiled graphs cannot raise warnings, so their shapes are checked in `step`."""
    hook.unsubscribe(check_first_shape)
    for kind, text in shape_warnings(hook).items():
        hook.state.warn_once(kind, text)


def shape_warnings(hook: SiteHook) -> dict[str, str]:
    """Return the warnings about the last shape, by kind, so that similar blocks warn only once."""
    found = [] if hook.last_shape is None else hook.regularizer.shape_warnings(hook.last_shape)
    see_all = "\n  all sites: print(plan(..., example_input=x))"
    return {re.sub(r"\d+", "#", text): f"{hook.where}: {text}{see_all}" for text in found}


def is_unchecked(hook: SiteHook) -> bool:
    """Whether the shape has not been checked yet."""
    return check_first_shape in hook.listeners


@contextmanager
def without_bookkeeping(model: nn.Module) -> Iterator[None]:
    """Restore the bookkeeping of all hooks afterwards: whether they ran, in which mode and with which shape."""
    hooks = [hook for _, hook in hooks_of(model)]
    marks = [(hook.called, hook.trained, hook.last_shape, hook.listeners) for hook in hooks]
    lives = {hook.state.live: (hook.state.live.checkpointed, hook.state.live.trained) for hook in hooks}
    for hook in hooks:
        hook.called = hook.trained = False
        hook.listeners = (note_call, check_first_shape) if is_unchecked(hook) else (note_call,)
    for live in lives:
        live.checkpointed = CheckpointedCalls()
    try:
        yield
    finally:
        for hook, mark in zip(hooks, marks, strict=True):
            hook.called, hook.trained, hook.last_shape, hook.listeners = mark
        for live, saved in lives.items():
            live.checkpointed, live.trained = saved


first_listeners += [note_call, check_first_shape]

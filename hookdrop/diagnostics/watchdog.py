"""Warnings during training that need no call: sites that never run, and a schedule that is not advancing.

The steps of PyTorch's optimizers are listened to: they are seen for compiled code, frozen layers and layers without
weights too. Other optimizers (fastai's, a loop written by hand) are noticed in the forwards. Both count the updates in
one place, and an update counts once.
"""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from hookdrop.diagnostics.checks import always_in_eval_text, discarded_text, problems, stalled
from hookdrop.diagnostics.training import Watch
from hookdrop.hooks.hook import SiteHook, first_listeners
from hookdrop.hooks.registry import hooks_of
from hookdrop.hooks.state import InjectionState, States, all_states

_watched = States()
_listening = False


def watch(model: nn.Module, state: InjectionState, *, copied: bool = False) -> None:
    """Watch the training of `model` until all sites have run; with a schedule, for as long as it exists."""
    global _listening
    state.live.watch = Watch(model, copied=copied)
    _watched.add(state)
    if not _listening:
        # For good: an optimizer that is calling its hooks would fail if one of them was removed.
        _listening = True
        register_optimizer_step_post_hook(_after_step)


def forget(state: InjectionState) -> None:
    """Watch no longer."""
    _watched.pop(id(state), None)


def is_watched(state: InjectionState) -> bool:
    """Whether the steps of optimizers may still lead to a warning."""
    return id(state) in _watched


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    discarded = []
    for state in _watched.listed():
        seen: Watch = state.live.watch
        model = seen.model()
        if model is not None:
            _look(seen, model, state, optimizer)
        elif state.live.trained or seen.copied:
            forget(state)
        elif seen.thread == threading.get_ident():
            # In another thread, `inject` may be about to return a handle that its caller drops at once.
            discarded.append(weakref.ref(state))
        del state  # this reference must not keep a state alive that has no handle
    if discarded and not any(_trains(optimizer, state.live.watch) for state in all_states.listed() if state.live.watch):
        _warn_about_discarded(discarded)


def _warn_about_discarded(discarded: list[weakref.ref[InjectionState]]) -> None:
    """Warn about models that went away untrained, while another one is trained that has no hooks."""
    gc.collect()  # warn about injections only if a handle is still held
    for state in filter(None, (reference() for reference in discarded)):
        forget(state)
        # A model that was pickled or copied lives on in its copy.
        if not any(other.key == state.key and other is not state for other in all_states.listed()):
            state.warn_once("discarded", discarded_text(state.name))


def _look(seen: Watch, model: nn.Module, state: InjectionState, optimizer: Optimizer) -> None:
    if seen.copied and not _trains(optimizer, seen):
        return  # the weights of an average change, but no optimizer has them
    seen.notice_update(state)
    if seen.silent:
        seen.silent = not all(hook.called for hook in state.live.members)
        if seen.silent and seen.was_updated() and _trains(optimizer, seen):
            seen.silent = False
            _warn(state, problems(model, state, [hook for _, hook in hooks_of(model) if hook.state is state]))
    if not (seen.silent or state.scheduled):
        forget(state)
    _warn(state, stalled(state))


def _trains(optimizer: Optimizer, seen: Watch) -> bool:
    weight = seen.weight()
    return any(weight is parameter for group in optimizer.param_groups for parameter in group["params"])


def _warn(state: InjectionState, found: dict[str, str]) -> None:
    for kind, text in found.items():
        state.warn_once(kind, text)


def watch_forwards(hook: SiteHook, module: nn.Module, value: Any) -> None:
    """Notice the updates of optimizers that are not PyTorch's, and layers that a training runs in eval mode."""
    state, live = hook.state, hook.state.live
    if live.watch is None and module.training and state.scheduled:
        watch(module, state, copied=True)
    seen: Watch | None = live.watch
    if module.training and (seen is None or _needs_no_forwards(state) or seen.sampler not in (None, hook.site)):
        return hook.unsubscribe(watch_forwards)
    if seen is None or seen.model() is None or not torch.is_grad_enabled():
        return None  # a copy, validation or inference
    if module.training and seen.sampler is None:
        seen.sampler = hook.site
    seen.notice_update(state, by_value=seen.sampler == hook.site)
    if module.training:
        _warn(state, stalled(state))
    elif live.root is not None and state.enabled and not live.contexts and seen.was_updated():
        state.warn_once("always in eval", always_in_eval_text(state, [hook.site]))
    return None


def _needs_no_forwards(state: InjectionState) -> bool:
    return not state.scheduled or state.live.driven or state.followed or "undriven" in state.warned_kinds


first_listeners.append(watch_forwards)

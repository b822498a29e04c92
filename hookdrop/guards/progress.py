"""Warn automatically during training about sites that never run and schedules that are not advancing.

A global post hook sees the steps of all PyTorch optimizers, which also covers compiled code, frozen layers and layers
without weights. Updates by other optimizers (fastai, custom loops) are detected in the forwards. Both are counted by
the same `UpdateCounter`, and each update counts once.
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

from hookdrop.guards.messages import message
from hookdrop.guards.problems import find_changes, find_problems
from hookdrop.guards.updates import UpdateCounter, has_lost_all_hooks, schedule_problems
from hookdrop.hooks.hook import SiteHook, first_listeners
from hookdrop.hooks.state import InjectionState, States, all_states

_watched = States()
_listening = False


def watch(model: nn.Module, state: InjectionState, *, copied: bool = False) -> None:
    """Watch the training of `model` until all sites have run, or permanently if it has a schedule."""
    global _listening
    state.live.update_counter = UpdateCounter(model, copied=copied)
    _watched.add(state)
    if not _listening:
        # Never removed: removal during the hook loop of an optimizer would fail.
        _listening = True
        register_optimizer_step_post_hook(_after_step)


def unwatch(state: InjectionState) -> None:
    """Stop watching."""
    _watched.pop(id(state), None)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    gone = []
    for state in _watched.snapshot():
        counter: UpdateCounter = state.live.update_counter
        model = counter.model()
        if model is not None:
            _check_state(counter, model, state, optimizer)
        elif state.live.trained or counter.copied:
            unwatch(state)
        elif counter.thread == threading.get_ident():
            # Other threads are skipped: their `inject` may not have returned its handle yet.
            gone.append(weakref.ref(state))
        del state  # or the loop variable keeps a state alive that has no handle
    counters = [state.live.update_counter for state in all_states.snapshot()] if gone else []
    if gone and not any(counter is not None and counter.is_trained_by(optimizer) for counter in counters):
        discarded(gone)


def discarded(gone: list[weakref.ref[InjectionState]]) -> None:
    """The model is gone, no hook ran in training mode, and an optimizer trains a model without hooks."""
    gc.collect()  # warn only about injections whose handle is still alive
    for state in filter(None, (reference() for reference in gone)):
        unwatch(state)
        # A pickled or copied model lives on in its copy.
        if not any(other.key == state.key and other is not state for other in all_states.snapshot()):
            state.warn_once("discarded", message("discarded", state))


def _check_state(counter: UpdateCounter, model: nn.Module, state: InjectionState, optimizer: Optimizer) -> None:
    trains = (counter.copied or counter.awaiting_first_calls) and counter.is_trained_by(optimizer)
    if counter.copied and not trains:
        return None  # the weights of an averaged model change, but no optimizer trains them
    counter.notice_update(state)
    if counter.awaiting_first_calls:
        counter.other_steps += not trains and not state.live.trained
        counter.awaiting_first_calls = not all(getattr(member, "called", True) for member in state.live.members)
        if trains:
            _compare(counter, model, state)
        if counter.awaiting_first_calls and trains and counter.was_updated():
            counter.awaiting_first_calls = False
            _warn(state, find_problems(model, state))
    if has_lost_all_hooks(state):
        _warn(state, find_changes(model, state))
        return unwatch(state)
    if not (counter.awaiting_first_calls or state.scheduled):
        unwatch(state)
    return _warn(state, schedule_problems(state))


def _compare(counter: UpdateCounter, model: nn.Module, state: InjectionState) -> None:
    """Compare the model with its injection, once."""
    if not counter.compared and not state.live.hidden_count:
        counter.compared = True
        _warn(state, find_changes(model, state))


def _warn(state: InjectionState, found: dict[str, str]) -> None:
    for kind, text in found.items():
        state.warn_once(kind, text)


def watch_forwards(hook: SiteHook, module: nn.Module, value: Any) -> None:
    """Compare the model in its first training forward, and watch for what no optimizer of PyTorch shows.

    These are updates by optimizers of other libraries, and layers that run in eval mode during training.
    """
    state, live = hook.state, hook.state.live
    if live.update_counter is None and module.training and state.scheduled:
        watch(module, state, copied=True)
    counter: UpdateCounter | None = live.update_counter
    model = None if counter is None else counter.model()
    if counter is not None and model is not None and module.training:
        _compare(counter, model, state)
    driven = not state.scheduled or live.was_stepped or state.followed or "not_advancing" in state.warned_kinds
    if module.training and (counter is None or driven or counter.sampler not in (None, hook.site)):
        return hook.unsubscribe(watch_forwards)
    if counter is None or model is None or not torch.is_grad_enabled():
        return None  # a copy, validation or inference
    if module.training and counter.sampler is None:
        counter.sampler = hook.site
    counter.notice_update(state, by_value=counter.sampler == hook.site)
    if module.training:
        _warn(state, schedule_problems(state))
    elif live.root is not None and state.enabled and not live.contexts and counter.was_updated():
        idle = {hook.site} | {other.site for other in live.members if other.called and not other.trained}
        state.warn_once(
            "always_in_eval", message("always_in_eval", state, [site for site in state.sites if site in idle])
        )
    return None


first_listeners.append(watch_forwards)

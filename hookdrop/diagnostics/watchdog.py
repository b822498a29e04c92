"""What is told where nobody asks, and no hook can tell: sites that never run, and schedules that nobody drives.

In compiled code, on layers without weights and on frozen ones the hooks see no updates, so the optimizers' steps are
listened to. The listener stays from the first injection on; it has something to do until all sites of an injection have
run or the verdict is out: as a rule, for one step. If there is a schedule it counts on.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from hookdrop.diagnostics.checks import problems
from hookdrop.diagnostics.judge import count_update, first_weight, stalled, was_updated
from hookdrop.hooks.registry import hooks_of
from hookdrop.hooks.state import State


@dataclass
class _Watched:
    state: weakref.ref[State]
    model: weakref.ref[nn.Module]
    weight: weakref.ref[nn.Parameter] | None = None
    """The first that is trained: to look for it at every step of every optimizer would take long."""
    silent: bool = True
    """Whether there may be sites that never ran, and nothing was told of it."""


_watched: dict[int, _Watched] = {}
"""By the state's id. It is walked as `list(...)`, which no other thread can come between."""
_listens = False


def watch(model: nn.Module, state: State) -> None:
    """Tell, when `model` was updated often enough, of sites that have not run and of a schedule that nobody drives."""
    global _listens
    state.seen_version = state.version
    _watched[id(state)] = _Watched(weakref.ref(state), weakref.ref(model))
    weakref.finalize(state, _watched.pop, id(state), None).atexit = False
    if not _listens:
        # For good: an optimizer that is just calling its hooks would fail if one of them went.
        _listens = True
        register_optimizer_step_post_hook(_after_step)


def forget(state: State) -> None:
    """Watch no longer."""
    _watched.pop(id(state), None)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    for watched in list(_watched.values()):
        state, model = watched.state(), watched.model()
        if state is None:
            continue
        if model is not None:
            _look(watched, model, state, optimizer)
        if model is None or not (watched.silent or state.scheduled):
            forget(state)


def _look(watched: _Watched, model: nn.Module, state: State, optimizer: Optimizer) -> None:
    weight = _weight(watched, model)
    if watched.silent:
        watched.silent = not all(hook.fired for hook in state.members)
        # The weights of an average are written to, but by no optimizer.
        if watched.silent and was_updated(model, state.version) and _trains(optimizer, weight):
            watched.silent = False
            _tell(state, problems(model, state, [hook for _, hook in hooks_of(model) if hook.state is state]))
    if state.scheduled:
        count_update(weight, state)
        _tell(state, stalled(state))


def _weight(watched: _Watched, model: nn.Module) -> nn.Parameter | None:
    weight = None if watched.weight is None else watched.weight()
    if weight is None or not weight.requires_grad:
        weight = first_weight(model)
        watched.weight = None if weight is None else weakref.ref(weight)
    return weight


def _trains(optimizer: Optimizer, weight: nn.Parameter | None) -> bool:
    return any(weight is parameter for group in optimizer.param_groups for parameter in group["params"])


def _tell(state: State, found: dict[str, str]) -> None:
    for kind, text in found.items():
        state.tell(kind, text)

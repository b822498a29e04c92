"""Sites that never run, told where nobody asks: no hook of theirs can, so the optimizers' steps are listened to.

The listener stays from the first injection on; it has something to do until all sites of an injection have run or the
verdict is out: as a rule, for one step.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from hookdrop.judge import was_updated
from hookdrop.placement import hooks_of
from hookdrop.problems import problems
from hookdrop.state import State

_waiting: dict[int, tuple[weakref.ref[State], weakref.ref[nn.Module]]] = {}
"""By the state's id. It is walked as `list(...)`, which no other thread can come between."""
_listens = False


def watch(model: nn.Module, state: State) -> None:
    """Tell what is wrong with `state` if some of its sites have not run when `model` was updated often enough."""
    global _listens
    _waiting[id(state)] = weakref.ref(state), weakref.ref(model)
    weakref.finalize(state, _waiting.pop, id(state), None).atexit = False
    if not _listens:
        # For good: an optimizer that is just calling its hooks would fail if one of them went.
        _listens = True
        register_optimizer_step_post_hook(_after_step)


def forget(state: State) -> None:
    """Watch no longer."""
    _waiting.pop(id(state), None)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    for state_of, model_of in list(_waiting.values()):
        state, model = state_of(), model_of()
        if state is None:
            continue
        silent = not all(hook.fired for hook in state.members)
        late = model is not None and was_updated(model, state.version)
        if late or model is None or not silent:
            forget(state)
        if model is not None and late and silent:
            _tell(model, state)


def _tell(model: nn.Module, state: State) -> None:
    hooks = [hook for _, hook in hooks_of(model) if hook.state is state]
    for kind, text in problems(model, state, hooks).items():
        state.tell(kind, text)

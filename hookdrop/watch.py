"""Sites that never run, told where nobody asks: no hook of theirs can, so the optimizers' steps are listened to.

The listener is there from an injection until all of its sites have run or the verdict is out: as a rule, for one step.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from hookdrop.judge import was_updated
from hookdrop.placement import hooks_of
from hookdrop.problems import problems
from hookdrop.state import State

_waiting: weakref.WeakKeyDictionary[State, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()
_listener: RemovableHandle | None = None


def watch(model: nn.Module, state: State) -> None:
    """Tell what is wrong with `state` if some of its sites have not run when `model` was updated often enough."""
    global _listener
    _waiting[state] = weakref.ref(model)
    weakref.finalize(state, _rest).atexit = False
    if _listener is None:
        _listener = register_optimizer_step_post_hook(_after_step)


def forget(state: State) -> None:
    """Watch no longer."""
    _waiting.pop(state, None)
    _rest()


def _rest() -> None:
    """Stop listening if nobody waits."""
    global _listener
    if not list(_waiting) and _listener is not None:
        _listener.remove()
        _listener = None


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    for state, reference in list(_waiting.items()):
        model = reference()
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

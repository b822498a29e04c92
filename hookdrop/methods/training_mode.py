"""Training mode for the forward of one module, but not for the modules inside it: to sample its functional dropout."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from hookdrop.core.sink import CompanionHook
from hookdrop.core.tensor_tree import tensors
from hookdrop.core.torch_internals import at_end_of_backward, graph_task


class TrainingMode:
    """Sets the flag of a module before its forward, and restores it after the forward, until it is removed.

    So the flag is right after `model.eval()`, all other hooks see the old one, and a copy of the model has it too. A
    checkpoint inside the module recomputes in the backward pass, in which the flag and the rate are those of the
    forward once more.

    Args:
        module: the module.
        rate: returns the present rate: the object, the attribute and the value of each setting.
    """

    active: ClassVar[set[TrainingMode]] = set()
    backwards: ClassVar[dict[int, ExitStack]] = {}
    """What the running backward passes have changed, by their number."""
    fast_path: ClassVar[bool] = True
    """Whether PyTorch may run a whole transformer layer as one kernel, which ignores the flags inside."""

    def __init__(self, module: nn.Module, rate: Callable[[], list[tuple[Any, str, Any]]]) -> None:
        self._rate = rate
        if not self.active:
            TrainingMode.fast_path = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
        self.active.add(self)
        # Of the calls in progress, on all threads: the flag is one, whichever thread sets it.
        self._before: list[tuple[nn.Module, bool]] = []
        enter, leave = _Switch(self, TrainingMode._enter), _Switch(self, TrainingMode._leave)
        self.handle: Any = module.register_forward_pre_hook(enter)  # None after the removal
        enter.handle = self.handle
        # The first after the forward, so that pairs of hooks are nested.
        leave.handle = module.register_forward_hook(leave, prepend=True, always_call=True)
        self._handles = enter.handle, leave.handle

    def _enter(self, module: nn.Module, *call: Any) -> None:
        self._before.append((module, module.training))
        module.training = True

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            again = partial(_as_in_forward, [(module, "training", True), *self._rate()])
            for node in {x.grad_fn for x in tensors(output) if x.grad_fn is not None}:
                node.register_prehook(again)
        for index, (running, training) in reversed(list(enumerate(self._before))):
            if running is module:  # not a replica of it on another device
                module.training = training
                del self._before[index]
                break

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self.handle = None
        for module, training in reversed(self._before):  # an interrupt runs no hooks
            module.training = training
        self.active.discard(self)
        for stack in self.backwards.values():  # of those that failed
            stack.close()
        self.backwards.clear()
        if not self.active:
            torch.backends.mha.set_fastpath_enabled(self.fast_path)


def _as_in_forward(settings: list[tuple[Any, str, Any]], *_: Any) -> None:
    """Set the flag and the rate until the running backward pass ends."""
    task = graph_task()
    if task not in TrainingMode.backwards:
        TrainingMode.backwards[task] = ExitStack()
        at_end_of_backward(lambda: TrainingMode.backwards.pop(task, ExitStack()).close())
    for owner, name, value in settings:
        TrainingMode.backwards[task].callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)


class _Switch(CompanionHook):
    """A hook that copies and pickles of the module do not inherit: theirs does nothing."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nullcontext().__exit__.__reduce__()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return nullcontext().__exit__

"""How far the training of a model has got, as its weights show."""

from __future__ import annotations

import threading
import weakref

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from hookdrop.hooks.state import InjectionState
from hookdrop.utils.torch_internals import dispatch_modes, functorch_stack, is_tracing, parameters_of, version_of

UPDATES_TO_JUDGE = 20
"""Updates of the weights after which a mistake is warned about. Accumulated gradients, recurrent calls and validation
update nothing."""

_SAMPLED = 1024
"""How many values of a weight are compared."""


class Watch:
    """Counts the updates of a model's weights, and those since the schedule last moved."""

    def __init__(self, model: nn.Module, *, copied: bool) -> None:
        self.model = weakref.ref(model)
        self.copied = copied
        """Whether the hooks are copies: those of a teacher or an average, perhaps, which no optimizer trains."""
        self.silent = not copied
        """Whether some site may never have run, and no warning was given."""
        self.updates = self.stalled = 0
        self.thread = threading.get_ident()
        self.sampler: str | None = None
        """The site in whose calls the weight's values are compared."""
        self._moves = 0
        self._visible = False
        """Whether an update moved the weight's version, as those of PyTorch's optimizers do."""
        self._values: Tensor | None = None
        self._owner: tuple[weakref.ref[nn.Module], str] | None = None
        """The module and the name of the weight: a weak reference to a parameter would keep it from being swapped."""
        weight = self.weight()
        self._first_version = self._version = None if weight is None else version_of(weight)

    def weight(self) -> nn.Parameter | None:
        """The first parameter that is trained: looking for it at every step would take long."""
        module = None if self._owner is None else self._owner[0]()
        weight = None if module is None or self._owner is None else parameters_of(module).get(self._owner[1])
        if weight is None or not weight.requires_grad:
            model = self.model()
            weight, self._owner = (None, None) if model is None else _first_weight(model)
        return weight

    def was_updated(self) -> bool:
        """Whether the weights were updated often enough to judge the training."""
        weight = self.weight()
        moved = 0 if weight is None or self._first_version is None else version_of(weight) - self._first_version
        return max(self.updates, moved) >= UPDATES_TO_JUDGE

    def notice_update(self, state: InjectionState, *, by_value: bool = False) -> None:
        """Count an update if the weights changed since the last look."""
        weight, live = self.weight(), state.live
        before, self._version = self._version, None if weight is None else version_of(weight)
        changed = before != self._version
        self._visible = self._visible or changed
        if by_value and weight is not None and not self._visible:
            changed = self._values_changed(weight)
        self.updates += changed
        if self._moves != live.moves or not state.enabled or live.contexts:
            self._moves, self.stalled = live.moves, 0
        else:
            self.stalled += changed

    def _values_changed(self, weight: nn.Parameter) -> bool:
        """An optimizer that writes to `parameter.data` moves no version: fastai's, say."""
        captured = weight.is_cuda and torch.cuda.is_current_stream_capturing()
        # None of this may become part of a trace.
        recorded = is_tracing() or dispatch_modes() > 0 or functorch_stack() is not None or captured
        if recorded or not weight.is_contiguous() or weight.is_meta:
            return False
        data = weight.detach()
        if type(data) is not Tensor or not data.numel():
            return False
        values = data.view(-1)[:: -(-data.numel() // _SAMPLED)].clone()
        before, self._values = self._values, values
        return before is not None and not (before.shape == values.shape and torch.equal(before, values))


def _first_weight(model: nn.Module) -> tuple[nn.Parameter | None, tuple[weakref.ref[nn.Module], str] | None]:
    """The first parameter that an optimizer may write to, and where it is."""
    for module in model.modules():
        for name, parameter in parameters_of(module).items():
            if parameter is None or isinstance(parameter, UninitializedParameter):
                continue
            if parameter.requires_grad and not parameter.is_inference():
                return parameter, (weakref.ref(module), name)
    return None, None


def was_updated(state: InjectionState) -> bool:
    """Whether the weights under these hooks were updated often enough to judge the training."""
    seen: Watch | None = state.live.watch
    return seen is not None and seen.was_updated()


def may_move(state: InjectionState) -> bool:
    """Whether the rate has not reached the end of its schedule."""
    end = state.schedule.settles_at
    if end is not None:
        return state.step_count < end
    # Where the end is not known, it is enough that the schedule is driven at all.
    return state.scheduled and not state.live.driven and not state.followed

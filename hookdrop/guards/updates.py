"""Count the updates of a model's weights."""

from __future__ import annotations

import weakref
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter, is_lazy
from torch.optim import Optimizer

from hookdrop.core.state import InjectionState
from hookdrop.core.torch_internals import dispatch_modes, functorch_stack, parameters_of, version_of

UPDATES_BEFORE_WARNING = 20
"""Weight updates before a warning is raised. Gradient accumulation, recurrent calls and validation do not update."""


class UpdateCounter:
    """Counts the updates of a hooked model by its first trainable weight, also since the schedule last advanced.

    Holds the model weakly.
    """

    def __init__(self, model: nn.Module, *, copied: bool) -> None:
        self.model = weakref.ref(model)
        self.copied = copied
        """Whether the hooks are copies, possibly of a teacher or an average that no optimizer trains."""
        self.awaiting_first_calls = not copied  # whether some site may not have run yet and no warning was raised
        self.compared = copied  # whether the model was compared with its injection since a hooked module was replaced
        self.updates = self.updates_since_step = 0
        self.sampler: str | None = None  # the site whose calls notice updates by optimizers of other libraries
        self.steps_of_others = 0  # steps of optimizers that do not train the model, before it was trained
        self._moves = 0
        self._owner: tuple[weakref.ref[nn.Module], str] | None = None
        """The module and name of the weight. A weak reference to the parameter itself would prevent swapping it."""
        weight = self._weight()
        self._first_version = self._version = None if weight is None else version_of(weight)
        self._values: list[float] | None = None  # some of the weights, because writes to `.data` do not change versions

    def _weight(self) -> nn.Parameter | None:
        """Return the first trainable parameter. It is cached, because a search at every step would be slow."""
        module = None if self._owner is None else self._owner[0]()
        weight = None if module is None or self._owner is None else parameters_of(module).get(self._owner[1])
        if weight is not None and weight.requires_grad:
            return weight
        model, self._owner = self.model(), None
        for module in () if model is None else model.modules():
            for name, weight in parameters_of(module).items():
                if weight is None or isinstance(weight, UninitializedParameter):
                    continue
                if weight.requires_grad and not weight.is_inference():
                    self._owner = weakref.ref(module), name
                    return weight
        return None

    def is_trained_by(self, optimizer: Optimizer) -> bool:
        weight = self._weight()
        return any(weight is parameter for group in optimizer.param_groups for parameter in group["params"])

    def was_updated(self) -> bool:
        """Whether the weights were updated often enough for a warning, also if no update was noticed."""
        weight = self._weight()
        moved = 0 if weight is None or self._first_version is None else version_of(weight) - self._first_version
        return max(self.updates, moved) >= UPDATES_BEFORE_WARNING

    def _sample(self) -> list[float] | None:
        """Return a value of each of about 8 trainable weights; None where none can be read. It waits for a GPU."""
        model, cuda = self.model(), cast("Any", torch.cuda)
        capturing = cuda.is_initialized() and cuda.is_current_stream_capturing()
        if model is None or capturing or dispatch_modes() > 0 or functorch_stack() is not None:
            return None
        own = [x for x in model.parameters() if x.requires_grad and not hasattr(x, "placements") and not is_lazy(x)]
        return [x.detach()[(0,) * x.dim()].item() for x in own[:: len(own) // 8 + 1] if x.numel()]

    def notice_update(self, state: InjectionState, after: Optimizer | None = None, samples: bool = False) -> None:
        """Count an update if the weights changed since the last call, by `samples` of values, or a step of `after`."""
        weight, live = self._weight(), state.live
        before, self._version = self._version, None if weight is None else version_of(weight)
        # Fused kernels do not increment the version.
        fused = after is not None and any(group.get("fused") for group in after.param_groups[:1])
        changed = before != self._version or (fused and after is not None and self.is_trained_by(after))
        if changed:
            self._values = None
        elif samples:
            last, self._values = self._values, self._sample()
            changed = None not in (last, self._values) and last != self._values
        self.updates += changed
        if self._moves != live.moves or not state.enabled or live.contexts:
            self._moves, self.updates_since_step = live.moves, 0
        else:
            self.updates_since_step += changed

"""Count the updates of a model's weights."""

from __future__ import annotations

import weakref

from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from hookdrop.core.state import InjectionState
from hookdrop.core.torch_internals import parameters_of, version_of

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
        self.compared = copied  # whether the model was compared with its injection
        self.updates = self.updates_since_step = 0
        self.steps_of_others = 0  # steps of optimizers that do not train the model, before it was trained
        self._progress: tuple[int, object] = (0, None)  # the moves of the schedule, and what it followed last
        self._owner: tuple[weakref.ref[nn.Module], str] | None = None
        """The module and name of the weight. A weak reference to the parameter itself would prevent swapping it."""
        weight = self._weight()
        self._first_version = self._version = None if weight is None else version_of(weight)

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

    def notice_update(self, state: InjectionState, after: Optimizer | None = None) -> None:
        """Count an update if the weight's version changed since the last call, or `after` a step of its optimizer."""
        weight, live = self._weight(), state.live
        before, self._version = self._version, None if weight is None else version_of(weight)
        # Fused kernels and writes to `.data` do not increment the version.
        changed = before != self._version or (after is not None and self.is_trained_by(after))
        self.updates += changed
        if live.loss_terms is not None:
            live.loss_terms.note_updates(self.updates)
        last, self._progress = self._progress, (live.moves, live.follower or self._progress[1])
        if last != self._progress or not state.enabled or live.contexts:
            self.updates_since_step = 0
        else:
            self.updates_since_step += changed

"""Count the updates of a model's weights, and compare them with the steps of its schedule."""

from __future__ import annotations

import threading
import weakref

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from hookdrop.errors import warn
from hookdrop.guards.messages import find, message
from hookdrop.hooks.state import InjectionState
from hookdrop.utils.torch_internals import dispatch_modes, functorch_stack, is_tracing, parameters_of, version_of

UPDATES_BEFORE_WARNING = 20
"""Weight updates before a warning is raised. Gradient accumulation, recurrent calls and validation do not update."""

_SAMPLED = 1024
"""The number of values of a weight that are compared."""


class UpdateCounter:
    """Counts the updates of a model's weights, in total and since the schedule last advanced."""

    def __init__(self, model: nn.Module, *, copied: bool) -> None:
        self.model = weakref.ref(model)
        self.copied = copied
        """Whether the hooks are copies, possibly of a teacher or an average that no optimizer trains."""
        self.awaiting_first_calls = not copied
        """Whether some site may not have run yet and no warning was raised."""
        self.compared = copied
        """Whether the model was compared with its injection at the start of the training."""
        self.updates = self.updates_since_step = 0
        self.other_steps = 0
        """The steps of optimizers that train other models, before this one is trained."""
        self.thread = threading.get_ident()
        self.sampler: str | None = None
        """The site whose calls compare the values of the weight."""
        self._moves = 0
        self._version_changes = False
        """Whether updates increment the weight's version, as those of PyTorch's optimizers do."""
        self._values: Tensor | None = None
        self._owner: tuple[weakref.ref[nn.Module], str] | None = None
        """The module and name of the weight. A weak reference to the parameter itself would prevent swapping it."""
        weight = self.weight()
        self._first_version = self._version = None if weight is None else version_of(weight)

    def weight(self) -> nn.Parameter | None:
        """Return the first trainable parameter. It is cached, because a search at every step would be slow."""
        module = None if self._owner is None else self._owner[0]()
        weight = None if module is None or self._owner is None else parameters_of(module).get(self._owner[1])
        if weight is None or not weight.requires_grad:
            model = self.model()
            weight, self._owner = (None, None) if model is None else _first_weight(model)
        return weight

    def is_trained_by(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer updates the weights."""
        weight = self.weight()
        return any(weight is parameter for group in optimizer.param_groups for parameter in group["params"])

    def was_updated(self) -> bool:
        """Whether the weights were updated often enough for a warning."""
        weight = self.weight()
        moved = 0 if weight is None or self._first_version is None else version_of(weight) - self._first_version
        return max(self.updates, moved) >= UPDATES_BEFORE_WARNING

    def notice_update(self, state: InjectionState, *, by_value: bool = False) -> None:
        """Count an update if the weights changed since the last call."""
        weight, live = self.weight(), state.live
        before, self._version = self._version, None if weight is None else version_of(weight)
        changed = before != self._version
        self._version_changes = self._version_changes or changed
        if by_value and weight is not None and not self._version_changes:
            changed = self._values_changed(weight)
        self.updates += changed
        if self._moves != live.moves or not state.enabled or live.contexts:
            self._moves, self.updates_since_step = live.moves, 0
        else:
            self.updates_since_step += changed

    def _values_changed(self, weight: nn.Parameter) -> bool:
        """Detect updates written to `parameter.data`, as by fastai's optimizers: these do not increment the version."""
        captured = weight.is_cuda and torch.cuda.is_current_stream_capturing()
        # The comparison must not be recorded in a trace or a CUDA graph.
        traced = is_tracing() or dispatch_modes() > 0 or functorch_stack() is not None or captured
        if traced or not weight.is_contiguous() or weight.is_meta:
            return False
        data = weight.detach()
        if type(data) is not Tensor or not data.numel():
            return False
        values = data.view(-1)[:: -(-data.numel() // _SAMPLED)].clone()
        before, self._values = self._values, values
        return before is not None and not (before.shape == values.shape and torch.equal(before, values))


def _first_weight(model: nn.Module) -> tuple[nn.Parameter | None, tuple[weakref.ref[nn.Module], str] | None]:
    """Find the first parameter that an optimizer may update, and its location."""
    for module in model.modules():
        for name, parameter in parameters_of(module).items():
            if parameter is None or isinstance(parameter, UninitializedParameter):
                continue
            if parameter.requires_grad and not parameter.is_inference():
                return parameter, (weakref.ref(module), name)
    return None, None


# --- the progress of a schedule


def schedule_problems(state: InjectionState, trained: bool | None = None) -> dict[str, str]:
    """Return the problems of a schedule by kind; None for `trained` waits for many updates."""
    return find(("optimizer_gone", "not_advancing", "too_fast"), Progress(state, trained)) if state.scheduled else {}


def has_lost_all_hooks(state: InjectionState) -> bool:
    """Whether no hook is left, so that the schedule is not the problem."""
    return bool(state.live.known_sites) and not any(hook.is_attached for hook in state.live.members)


class Progress:
    """The steps of a schedule, and the updates of the weights."""

    def __init__(self, state: InjectionState, trained: bool | None) -> None:
        self.state, self.trained, self.name, live = state, trained, state.name, state.live
        counter: UpdateCounter | None = live.update_counter
        self.updates, self._since_step = (0, 0) if counter is None else (counter.updates, counter.updates_since_step)
        self._gone = live.follower is not None and not state.followed
        end = state.schedule.settles_at
        # If the end is unknown, the schedule counts as advancing once it has been stepped.
        can_advance = state.step_count < end if end is not None else not (live.was_stepped or state.followed)
        self._due = can_advance and not has_lost_all_hooks(state)

    @property
    def optimizer_gone(self) -> bool:
        """The weak reference to the optimizer is dead before the end of the schedule."""
        return self._due and self._gone and (self.trained is not None or self._since_step > 0)

    @property
    def not_advancing(self) -> bool:
        """The weights were updated over 20 times since the schedule advanced; `check()` does not wait."""
        state = self.state
        idle = self.trained and not state.live.was_stepped and not state.followed
        idle = idle and (state.step_count == 0 or self._since_step > 0)
        return self._due and not self._gone and (bool(idle) or self._since_step > UPDATES_BEFORE_WARNING)

    @property
    def too_fast(self) -> bool:
        """The schedule advanced at least twice as often as the weights were updated, over 20 updates or more."""
        updates = self.updates
        return (
            self._due and not self.state.followed and self.state.live.moves >= 2 * updates >= 2 * UPDATES_BEFORE_WARNING
        )


def trains_other_model(state: InjectionState, model: nn.Module, optimizer: Optimizer) -> None:
    """No parameter of the model is in the groups of the optimizer."""
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if trained.isdisjoint(map(id, model.parameters())):
        warn(message("trains_other_model", state))


def restarted(state: InjectionState, steps: int) -> None:
    """At the first step that is counted, the state of the optimizer has more steps than the schedule."""
    if state.scheduled and not state.live.was_stepped and steps > state.step_count + 1:
        state.warn_once("restarted", message("restarted", state, {"steps": steps - 1}))

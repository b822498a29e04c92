"""Warn automatically during training about sites that never run and schedules that are not advancing.

A global post hook sees the steps of all PyTorch optimizers, which also covers compiled code, frozen layers and layers
without weights. Updates by other optimizers are detected in forward passes. The same `UpdateCounter` counts both.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter, is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hookdrop.core import events
from hookdrop.core.hook import SiteHook, first_listeners
from hookdrop.core.sink import RateSink
from hookdrop.core.state import InjectionState
from hookdrop.core.torch_internals import dispatch_modes, functorch_stack, parameters_of, version_of
from hookdrop.guards.messages import find, warn_each
from hookdrop.guards.problems import CHANGES, USE, Comparison, check_first_shape, shape_warnings

PROGRESS = ("optimizer_gone", "not_advancing", "too_fast", "too_slow", "other_optimizer", "ended_early", "restarted")
UPDATES_BEFORE_WARNING = 20
"""Weight updates before a warning is raised. Gradient accumulation, recurrent calls and validation do not update."""
MOST_EPOCHS = 100  # a schedule that ends after so few steps may be one that counts epochs


# --- the updates of the weights


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
        self._groups: weakref.WeakKeyDictionary[Optimizer, tuple[int, bool]] = weakref.WeakKeyDictionary()
        self._progress: tuple[int, object] = (0, None)  # the moves of the schedule, and what it followed last
        self._owner: tuple[weakref.ref[nn.Module], str] | None = None
        """The module and name of the weight. A weak reference to the parameter itself would prevent swapping it."""
        weight = self._weight()
        self._first_version = self._version = None if weight is None else version_of(weight)
        self._seen = id(weight)
        self.sampler: str | None = None  # the site in whose calls values of the weights are read
        self._values: list[float] | None = None

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
        """Whether the optimizer has a parameter of the model. It is looked up once for each number of groups."""
        groups, model = len(optimizer.param_groups), self.model()
        if self._groups.get(optimizer, (0, False))[0] != groups:
            own = {id(one) for one in (() if model is None else model.parameters())}
            trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            self._groups[optimizer] = groups, any(id(parameter) in own for parameter in trained)
        return self._groups[optimizer][1]

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
        read = [x.detach()[(0,) * x.dim()] for x in own[:: len(own) // 8 + 1] if x.numel() and not x.is_meta]
        return [x.item() for x in read]

    def notice_update(self, state: InjectionState, after: Optimizer | None = None, samples: bool = False) -> None:
        """Count an update if the weight's version or, if it `samples`, values changed, or `after` a step."""
        weight, live = self._weight(), state.live
        before, self._version = self._version, None if weight is None else version_of(weight)
        seen, self._seen = self._seen, id(weight)
        # In `functional_call`, it is another tensor. Fused kernels and writes to `.data`, as of fastai's optimizers, do
        # not increment the version.
        changed = (seen == self._seen and before != self._version) or (after is not None and self.is_trained_by(after))
        if changed:
            self._values = None
        elif samples:
            values, self._values = self._values, self._sample()
            changed = None not in (values, self._values) and values != self._values
        self.updates += changed
        if live.loss_terms is not None:
            live.loss_terms.note_updates(self.updates)
        last, self._progress = self._progress, (live.moves, live.follower or self._progress[1])
        if last != self._progress or not state.enabled or live.contexts:
            self.updates_since_step = 0
        else:
            self.updates_since_step += changed


# --- the progress of a schedule


def schedule_problems(state: InjectionState, trained: bool | None = None) -> dict[str, str]:
    """Return the problems of a schedule and of a penalty by kind; None for `trained` waits for many updates."""
    kinds = [*PROGRESS * state.scheduled, *["unread_penalty"] * (state.live.loss_terms is not None)]
    return find(kinds, Progress(state, trained)) if kinds and not state.removed else {}


_COUNT = (
    "after inject: drop.follow(optimizer)   or after each optimizer.step(): drop.step()   or: drop.seek(global_step)"
)
_FOLLOW_ANOTHER = "follow the one that steps: drop.follow(None).follow(optimizer)   or, after follow(None): drop.step()"


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
        self._due = can_advance and not live.has_lost_all_hooks
        self._end = end or 0
        self.why, self.advice = "nothing calls step(), seek() or follow()", _COUNT
        if state.followed:
            self.why, self.advice = "the optimizer that it follows does not step", _FOLLOW_ANOTHER
        self._fast = live.moves >= 2 * self.updates >= 2 * UPDATES_BEFORE_WARNING
        self._slow = live.moves >= 2 and self.updates >= max(10, 5 * state.step_count)

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
        waited = self._since_step > UPDATES_BEFORE_WARNING and "too_slow" not in state.warned_kinds
        return self._due and not self._gone and (bool(idle) or waited)

    @property
    def too_fast(self) -> bool:
        """The schedule advanced at least twice as often as the weights were updated, over 20 updates or more."""
        return self._due and not self.state.followed and self._fast

    @property
    def too_slow(self) -> bool:
        """`step()` was called at least twice, and the weights were updated five times as often, over 10 times."""
        return self._due and not self.state.followed and self._slow

    @property
    def other_optimizer(self) -> bool:
        """The optimizer that it follows has no parameter of the model, and steps much more or less often than that."""
        live, counter = self.state.live, self.state.live.update_counter
        differs = self._due and self.state.followed and counter is not None and (self._fast or self._slow)
        return bool(differs and live.follower and not counter.is_trained_by(live.follower.optimizer))

    @property
    def ended_early(self) -> bool:
        """The end of the schedule looks like a number of epochs, and steps and updates are at 100 times that number."""
        return 0 < self._end <= MOST_EPOCHS and min(self.state.step_count, self.updates) >= 100 * self._end

    @property
    def restarted(self) -> dict[str, Any]:
        """When its first step was counted, the optimizer or its learning-rate scheduler had the state of more steps."""
        step, ahead, end = self.state.step_count, self.state.live.steps_ahead, self.state.schedule.settles_at
        if ahead is None or (end is not None and step >= end):
            return {}
        if not ahead:
            return {"taken": "steps", "to": "global_step"}
        return {"taken": f"{step + ahead} steps", "to": step + ahead}

    @property
    def unread_penalty(self) -> dict[str, int]:
        """The weights were updated 20 times, and nothing read the loss terms of the forward passes before."""
        terms = self.state.live.loss_terms
        unread = 0 if terms is None else terms.unread_updates
        return {"unread": unread} if unread >= UPDATES_BEFORE_WARNING else {}


# --- while the model is trained

_watched: weakref.WeakValueDictionary[int, InjectionState] = weakref.WeakValueDictionary()


def _watched_states() -> list[InjectionState]:
    # Iterating a WeakSet fails if another thread adds to it.
    return [state for reference in _watched.valuerefs() if (state := reference()) is not None]


@cache
def _listen() -> None:
    # Never removed: removal during the hook loop of an optimizer would fail.
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def watch(model: nn.Module, state: InjectionState, *, copied: bool = False) -> None:
    """Watch the training of `model` until all sites have run, or permanently if it has a schedule."""
    state.live.update_counter = UpdateCounter(model, copied=copied)
    _watched[id(state)] = state
    _listen()


def unwatch(state: InjectionState) -> None:
    _watched.pop(id(state), None)


# --- what the core announces


def begin(plan: Any, state: InjectionState, sinks: Sequence[RateSink]) -> None:
    """Watch a model from its injection on."""
    # The first forward must not repeat the warnings of the plan.
    state.warned_kinds |= plan.by_kind.keys()
    if plan.by_kind:
        state.live.planned = {kind: text for kind, text in plan.by_kind.items() if kind in ("erased", "on_output")}
    if isinstance(sinks[0], SiteHook) or state.scheduled:
        watch(plan.root, state)


def check(model: nn.Module, state: InjectionState, sinks: Sequence[RateSink], requested: bool = True) -> dict[str, str]:
    """Return the problems of an injection at these sinks by kind; if `requested` by the user, idle sites earlier."""
    if state.removed:
        return {"removed": f"{state.name!r} was removed from its model."} if requested else {}
    counter, planned = state.live.update_counter, dict(state.live.planned)
    if any(sink.target != sink.initial_target for sink in state.live.members):
        planned.pop("erased", None)
    hooks = [sink for sink in sinks if isinstance(sink, SiteHook)]
    compared = Comparison(model, state, hooks, requested)
    found = find((*CHANGES, *USE), compared) | planned
    for hook in compared.intact:
        if check_first_shape in hook.listeners:
            found |= shape_warnings(hook)
    trained = any(hook.trained for hook in hooks) if hooks else counter is not None and counter.updates > 0
    return found | schedule_problems(state, trained)


def _warn(model: nn.Module | None, states: Sequence[InjectionState], sinks: Sequence[RateSink]) -> None:
    """Warn about the problems of injections."""
    if model is not None:
        for state in states:
            warn_each(state, check(model, state, [sink for sink in sinks if sink.state is state], requested=False))


events.placed.append(begin)
events.checks.append(check)
events.moved.append(_warn)
events.removing.append(_warn)
events.removed.append(unwatch)


_stepping: set[int] = set()
"""The ids of the optimizers whose step has begun and was not seen yet, as in `Follower`."""


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    _stepping.add(id(optimizer))
    for state in _watched_states():
        follower = state.live.follower
        if follower is not None and follower.optimizer is optimizer and not state.live.was_stepped:
            _note_steps_before(state, optimizer)


def _note_steps_before(state: InjectionState, optimizer: Optimizer) -> None:
    """Before the first step of a followed optimizer, warn if its state shows that it has already taken steps."""
    own = [one for one in optimizer.state.values() if one]
    counts = [int(one["step"]) for one in own if isinstance(one, dict) and "step" in one][:1]  # as in Adam
    if counts and counts[0] > state.step_count:
        state.live.steps_ahead = counts[0] - state.step_count
    elif own and not counts and not state.step_count:
        state.live.steps_ahead = 0
    warn_each(state, schedule_problems(state))


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling() or id(optimizer) not in _stepping:
        return
    _stepping.discard(id(optimizer))
    for state in _watched_states():
        counter: UpdateCounter = state.live.update_counter
        model = counter.model()
        if model is not None:
            _check_state(counter, model, state, optimizer)
        else:
            unwatch(state)


def _check_state(counter: UpdateCounter, model: nn.Module, state: InjectionState, optimizer: Optimizer) -> None:
    unsettled = counter.awaiting_first_calls or not counter.compared
    trains = (counter.copied or unsettled) and counter.is_trained_by(optimizer)
    counter.steps_of_others += not (trains or state.live.trained or counter.copied)
    if counter.copied and not trains:
        return  # the weights of an averaged model change, but no optimizer trains them
    counter.notice_update(state, optimizer)
    if trains and unsettled:
        _compare(counter, model, state)
    if counter.awaiting_first_calls:
        counter.awaiting_first_calls = not all(getattr(member, "called", True) for member in state.live.members)
        if counter.awaiting_first_calls and trains and counter.was_updated():
            counter.awaiting_first_calls = False
            warn_each(state, check(model, state, [*state.live.members], requested=False))
    if state.live.has_lost_all_hooks:
        warn_each(state, find(CHANGES, Comparison(model, state)))
        unwatch(state)
        return
    if counter.compared and not (counter.awaiting_first_calls or state.scheduled or state.live.loss_terms):
        unwatch(state)
    warn_each(state, schedule_problems(state))


def _compare(counter: UpdateCounter, model: nn.Module, state: InjectionState) -> None:
    """Compare the model with its injection."""
    if not state.live.hidden_count:
        counter.compared = True
        warn_each(state, find(CHANGES, Comparison(model, state)))


def watch_forwards(hook: SiteHook, module: nn.Module, value: Any) -> None:
    """Compare the model in its first training forward, and watch for updates by optimizers of other libraries."""
    state, live = hook.state, hook.state.live
    if live.update_counter is None and module.training and (state.scheduled or live.loss_terms):
        watch(module, state, copied=True)
    counter: UpdateCounter | None = live.update_counter
    if counter is None or (model := counter.model()) is None:
        return hook.unsubscribe(watch_forwards) if module.training else None
    if module.training and not counter.compared:
        _compare(counter, model, state)
    driven = not state.scheduled or live.was_stepped or state.followed or "not_advancing" in state.warned_kinds
    if module.training and driven and live.loss_terms is None:
        return hook.unsubscribe(watch_forwards)
    if not torch.is_grad_enabled():
        return None  # validation or inference
    counter.sampler = counter.sampler or hook.site
    counter.notice_update(state, samples=module.training and not driven and counter.sampler == hook.site)
    if module.training:
        warn_each(state, schedule_problems(state))
    elif live.root is not None and state.enabled and not live.contexts and counter.was_updated():
        warn_each(state, find(["always_in_eval"], Comparison(model, state)))
    return None


first_listeners.append(watch_forwards)

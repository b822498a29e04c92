"""Count the updates of a model's weights, and compare them with the steps of its schedule."""

from __future__ import annotations

import threading

from torch import nn
from torch.optim import Optimizer

from hookdrop.guards.messages import find, message
from hookdrop.hooks.state import InjectionState
from hookdrop.utils.errors import warn
from hookdrop.utils.weights import WeightUpdates

UPDATES_BEFORE_WARNING = 20
"""Weight updates before a warning is raised. Gradient accumulation, recurrent calls and validation do not update."""


class UpdateCounter(WeightUpdates):
    """Counts the updates of a hooked model's weights, in total and since the schedule last advanced."""

    def __init__(self, model: nn.Module, *, copied: bool) -> None:
        super().__init__(model)
        self.copied = copied
        """Whether the hooks are copies, possibly of a teacher or an average that no optimizer trains."""
        self.awaiting_first_calls = not copied
        """Whether some site may not have run yet and no warning was raised."""
        self.compared = copied
        """Whether the model was compared with its injection at the start of the training."""
        self.updates_since_step = self.other_steps = 0
        """The steps of optimizers that train other models, before this one is trained."""
        self.thread = threading.get_ident()
        self.sampler: str | None = None
        """The site whose calls compare the values of the weight."""
        self._moves = 0

    def was_updated(self) -> bool:
        """Whether the weights were updated often enough for a warning."""
        return self.updates_so_far >= UPDATES_BEFORE_WARNING

    def notice_update(self, state: InjectionState, *, by_value: bool = False) -> None:
        """Count an update if the weights changed since the last call."""
        changed, live = self.notice(by_value=by_value), state.live
        if self._moves != live.moves or not state.enabled or live.contexts:
            self._moves, self.updates_since_step = live.moves, 0
        else:
            self.updates_since_step += changed


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


def restarted(state: InjectionState, steps: int, had_state: bool) -> None:
    """At the first step that is counted, the optimizer has the state of more steps than the schedule, or momentum."""
    if state.scheduled and not state.live.was_stepped:
        if steps > state.step_count + 1:
            state.warn_once("restarted", message("restarted", state, {"taken": f"{steps - 1} steps", "to": steps - 1}))
        elif had_state and not steps and not state.step_count:
            state.warn_once("restarted", message("restarted", state, {"taken": "steps", "to": "global_step"}))

"""Noticing, from the forwards of a training, that it does not do what it seems to do."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hookdrop.hooks.state import State
from hookdrop.utils.tables import some

# Updates of a layer's parameters, seen in its forwards, after which a mistake is told. Accumulated gradients, recurrent
# calls and validation do not update parameters. A layer without any is judged by its calls.
UPDATES_TO_JUDGE = 20
CALLS_TO_JUDGE = 1000


class Judge:
    """Counts, for one site, the optimizer steps that passed without what should have come with them."""

    def __init__(self) -> None:
        self.trained = False
        """Whether the layer ever ran in training mode."""
        self.done = False
        """Whether there is nothing left that a forward could tell."""
        self.seen_moves = 0
        self.version: int | None = None
        self.updates = 0.0

    def look(self, module: nn.Module, site: str, state: State) -> None:
        """Look at one forward, and tell what is wrong once it is clear."""
        if module.training:
            self.trained, self.done = True, not state.scheduled
            if self.done:
                return
            if self.seen_moves != state.moves:
                self.seen_moves, self.updates = state.moves, 0.0
            elif state.follower is not None and not state.follower.alive:
                if should_move(state):
                    state.tell("optimizer gone", optimizer_gone_text(state))
            elif self._is_clear("undriven", module, state):
                state.tell("undriven", undriven_text(state))
        elif not self.trained and _may_be_training(state) and self._is_clear("always in eval", module, state):
            state.tell("always in eval", always_in_eval_text(state, [site]))

    def _is_clear(self, kind: str, module: nn.Module, state: State) -> bool:
        """Whether it is time to tell, this forward counted."""
        if kind in state.told or not state.enabled or state.contexts:
            return False
        part = self._part(module)
        # Calls tell nothing of steps where somebody drives: a recurrent layer has thousands a step.
        waits = should_move(state) if self.version is not None else state.undriven
        if part and (kind != "undriven" or waits):
            self.updates += part
        return self.updates >= 1.0

    def _part(self, module: nn.Module) -> float:
        """The part of a verdict that this forward is: none, mostly."""
        before, self.version = self.version, version_of(module)
        if self.version is None:
            return 1 / CALLS_TO_JUDGE
        return 1 / UPDATES_TO_JUDGE if before not in (None, self.version) else 0.0


def _may_be_training(state: State) -> bool:
    """Whether a forward in eval mode may be one of somebody who forgot `train()`."""
    # Nobody trains without gradients: that is validation, an EMA's too, whose weights are written to, or inference.
    # Nor is a copy (an EMA, a teacher, a model that was loaded) there to be trained because its original is.
    return torch.is_grad_enabled() and state.root is not None


def version_of(module: nn.Module) -> int | None:
    """How often the first trainable parameter was written to; None if there is none."""
    weight = first_weight(module)
    return None if weight is None else weight._version


def first_weight(module: nn.Module) -> nn.Parameter | None:
    """The first parameter that an optimizer may write to."""
    # In the forwards: `module.parameters()` takes twice as long to come to the first.
    for part in module.modules():
        for parameter in part._parameters.values():
            if parameter is not None and _is_trainable(parameter):
                return parameter
    return None


def _is_trainable(parameter: nn.Parameter) -> bool:
    return parameter.requires_grad and not is_lazy(parameter) and not parameter.is_inference()


def was_updated(module: nn.Module, since: int | None) -> bool:
    """Whether an optimizer must have been at work on `module` since its version was `since`."""
    now = version_of(module)
    return now is not None and since is not None and now - since >= UPDATES_TO_JUDGE


def count_update(weight: nn.Parameter | None, state: State) -> None:
    """Count an optimizer's step for a state, if it changed the model's weights and nobody drove the schedule."""
    before, state.seen_version = state.seen_version, None if weight is None else weight._version
    followed = state.follower is not None and state.follower.alive
    if followed or not state.enabled or state.contexts:
        state.updates = 0
    elif before != state.seen_version:
        state.updates += 1


def stalled(state: State) -> dict[str, str]:
    """What to say, by its kind, of a schedule that the updates of the model have left behind."""
    # By then a hook that sees updates has told it, with the layer's line.
    if state.updates <= UPDATES_TO_JUDGE or not state.scheduled or not should_move(state):
        return {}
    if state.follower is not None:
        return {"optimizer gone": optimizer_gone_text(state)}
    return {"undriven": undriven_text(state)}


def should_move(state: State) -> bool:
    """Whether the rate is not yet where its schedule ends."""
    schedule, step = state.schedule, state.step_count
    # Where the end of a schedule can't be told it is asked only that somebody drives it.
    return state.undriven if schedule.peak is None else schedule(step) != schedule(step + 10**9)


def undriven_text(state: State) -> str:
    """What to say of a schedule that nobody drives."""
    return (
        f"{state.name!r} is still at step {state.step_count} of {state.schedule}, so its rate does not move: "
        "nobody drives it.\n"
        "  after inject: drop.follow(optimizer)   or after each optimizer.step(): drop.step()   "
        "or: drop.seek(global_step)"
    )


def optimizer_gone_text(state: State) -> str:
    """What to say of an optimizer that does not exist any more."""
    return (
        f"{state.name!r}: the optimizer that it followed is gone (rebuilt, or copied?), so the rate stays.\n"
        "  follow the new one: drop.follow(optimizer)"
    )


def always_in_eval_text(state: State, sites: Sequence[str]) -> str:
    """What to say of layers that never ran in training mode."""
    return (
        f"{state.name!r}: {some(sites)} only ran in eval mode, where nothing is dropped.\n"
        "  call model.train() before training; a layer that its owner keeps in eval (frozen batch norm) is left alone: "
        "hook another, such as the convolution before it."
    )

"""The shared state of the hooks of one injection: `InjectionState` is copied with them, `LiveState` is not."""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from hookdrop.core.checkpointing import CheckpointedCalls
from hookdrop.core.errors import warn
from hookdrop.core.follow import Follower
from hookdrop.core.schedules import ConstantSchedule, Schedule


@dataclass(eq=False)
class Override:
    """The settings that a context overrides; None does not override."""

    sampling: bool | None = None  # True enables the hooks, also in eval mode. False disables them.
    p: float | None = None
    step: int | None = None
    open: bool = True  # whether its context has not exited yet


class LiveState:
    """State that belongs to this process and model. A copied injection starts with a new one."""

    def __init__(self) -> None:
        self.root: weakref.ref[nn.Module] | None = None  # the model that the hooks were placed on; None in a copy
        self.survey: Any = None  # what running the model showed to a recipe over its own dropout
        self.planned: dict[str, str] = {}  # by kind, the warnings of the plan that stay true
        self.members: weakref.WeakSet[Any] = weakref.WeakSet()
        """Weak references to the hooks, so that a copy of one layer does not copy the others."""
        self.known_sites: set[str] = set()  # the sites of all current and former members
        self.follower: Follower | None = None
        self.was_stepped = False  # whether `step`, `seek` or `follow` has changed the step count in this process
        self.steps_ahead: int | None = None
        """How many more steps a followed optimizer has taken, until the step is set; 0 if it does not tell."""
        self.moves = 0  # how many times the step count changed
        self.trained = False  # whether any hook ran in training mode
        self.hidden_count = 0  # how many active `without_hooks` contexts hide the hooks
        self.overrides: list[Override] = []  # the active overrides, innermost last
        self.contexts: list[Override] = []  # the overrides of all contexts that have not exited
        self.observe: Callable[..., Tensor] | None = None
        """Called with (hook, tensor, rate, **context) in place of the regularizer by `probe` and `recording`."""
        self.checkpointed = CheckpointedCalls()
        self.loss_terms: Any = None  # the `LossTerms` of penalties; None if no hook has a penalty
        self.update_counter: Any = None  # the `UpdateCounter` of `guards.progress.watch`

    @property
    def has_lost_all_hooks(self) -> bool:
        return bool(self.known_sites) and not any(hook.is_attached for hook in self.members)

    def __reduce__(self) -> Any:
        return LiveState, ()


@dataclass(eq=False)
class InjectionState:
    """Name, sites, schedule, step count and switches, which are copied and pickled with the hooks."""

    name: str
    sites: tuple[str, ...]
    schedule: Schedule
    step_count: int = 0
    enabled: bool = True
    portable: bool = False  # whether pickles of the model leave the hooks out
    recipe: Mapping[str, Any] | None = None
    """The arguments of `inject` with which a recipe chooses the same sites again."""
    removed: bool = False
    training_ended: bool = False  # whether it was placed by a callback for a training that has ended
    warned_kinds: set[str] = field(default_factory=set)
    key: str = field(default_factory=lambda: uuid.uuid4().hex)  # identifies copies of the same original
    live: LiveState = field(default_factory=LiveState)

    @property
    def scheduled(self) -> bool:
        """Whether the schedule is not constant, so that it needs `step`, `seek` or `follow`."""
        return not isinstance(self.schedule, ConstantSchedule)

    @property
    def followed(self) -> bool:
        """Whether steps are counted by an optimizer that still exists."""
        return self.live.follower is not None and self.live.follower.optimizer is not None

    def unfollow(self) -> None:
        """Stop counting the steps of an optimizer."""
        if self.live.follower is not None:
            self.live.follower.detach()
        self.live.follower = None

    @property
    def step(self) -> int:
        return next((o.step for o in reversed(self.live.overrides) if o.step is not None), self.step_count)

    @property
    def multiplier(self) -> float:
        schedule = self.schedule
        return schedule.value if type(schedule) is ConstantSchedule else float(schedule(self.step))

    @property
    def override(self) -> Override | None:
        """The innermost override that enables or disables the hooks."""
        for override in reversed(self.live.overrides):
            if override.sampling is not None:
                return override
        return None

    @property
    def on(self) -> bool:
        """Whether hooks are active in training mode."""
        override = self.override
        return not self.removed and (self.enabled if override is None else bool(override.sampling))

    @property
    def sampling(self) -> bool:
        """Whether hooks are active in eval mode."""
        return not self.removed and self.override is not None and bool(self.override.sampling)

    @contextmanager
    def overriding(self, override: Override) -> Iterator[None]:
        """Activate `override` inside. Each context removes its own entry, so contexts may exit in any order."""
        live, before = self.live, (self.enabled, list(self.live.overrides))
        live.contexts.append(override)
        live.overrides.append(override)
        try:
            yield
        finally:
            override.open = False
            if live.contexts[-1] is override:
                self.enabled, live.overrides = before
            live.contexts = [context for context in live.contexts if context.open]
            live.overrides = [context for context in live.overrides if context.open]

    def set_enabled(self, enabled: bool) -> None:
        """Enable or disable the hooks; inside a context, until it exits."""
        self.enabled = enabled
        self.live.overrides = [override for override in self.live.overrides if override.sampling is None]

    def warn_once(self, kind: str, text: str) -> None:
        if kind not in self.warned_kinds:
            self.warned_kinds.add(kind)
            warn(text)

"""The shared state of the hooks of one injection: `InjectionState` is copied with them, `LiveState` is not."""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from hookdrop.hooks.checkpointing import CheckpointedCalls
from hookdrop.hooks.optimizer import Follower
from hookdrop.schedules import ConstantSchedule, Schedule
from hookdrop.utils.errors import warn


@dataclass(eq=False)
class Override:
    """The settings that a context overrides; None does not override."""

    sampling: bool | None = None
    """True enables the hooks, also in eval mode. False disables them."""
    p: float | None = None
    step: int | None = None
    open: bool = True
    """Whether its context has not exited yet."""


class LiveState:
    """State that belongs to this process and model. A copied injection starts with a new one."""

    def __init__(self) -> None:
        self.root: weakref.ref[nn.Module] | None = None
        """The model that the hooks were placed on; None in a copy."""
        self.members: weakref.WeakSet[Any] = weakref.WeakSet()
        """Weak references to the hooks, so that a copy of one layer does not copy the others."""
        self.known_sites: set[str] = set()
        """The sites of all current and former members."""
        self.follower: Follower | None = None
        self.was_stepped = False
        """Whether `step`, `seek` or `follow` has changed the step count in this process."""
        self.steps_ahead: int | None = None
        """How many more steps a followed optimizer has taken, until the step is set; 0 if it does not tell."""
        self.moves = 0
        """How many times the step count changed."""
        self.trained = False
        """Whether any hook ran in training mode."""
        self.hidden_count = 0
        """How many active `without_hooks` contexts hide the hooks."""
        self.overrides: list[Override] = []
        """The active overrides, innermost last."""
        self.contexts: list[Override] = []
        """The overrides of all contexts that have not exited."""
        self.observe: Callable[..., Tensor] | None = None
        """Called with (hook, tensor, rate, **context) in place of the regularizer by `probe` and `recording`."""
        self.checkpointed = CheckpointedCalls()
        self.update_counter: Any = None
        """The `UpdateCounter` of `guards.progress`."""

    def __reduce__(self) -> Any:
        return LiveState, ()


class States(weakref.WeakValueDictionary[int, "InjectionState"]):
    """A thread-safe weak set of states."""

    def add(self, state: InjectionState) -> None:
        """Add `state`."""
        self[id(state)] = state

    def snapshot(self) -> list[InjectionState]:
        """Return the states that are alive."""
        # Iterating a WeakSet fails if another thread adds to it.
        return [state for reference in self.valuerefs() if (state := reference()) is not None]


all_states = States()
"""The states of all live hooks."""


@dataclass(eq=False)
class InjectionState:
    """Name, sites, schedule, step count and switches, which are copied and pickled with the hooks."""

    name: str
    sites: tuple[str, ...]
    schedule: Schedule
    step_count: int = 0
    enabled: bool = True
    portable: bool = False
    """Whether pickles of the model leave the hooks out."""
    recipe: Mapping[str, Any] | None = None
    """The arguments of `inject` with which a recipe chooses the same sites again."""
    removed: bool = False
    warned_kinds: set[str] = field(default_factory=set)
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Identifies copies of the same original."""
    live: LiveState = field(default_factory=LiveState)

    @property
    def scheduled(self) -> bool:
        """Whether the schedule is not constant, so that it needs `step`, `seek` or `follow`."""
        return not isinstance(self.schedule, ConstantSchedule)

    @property
    def followed(self) -> bool:
        """Whether steps are counted by an optimizer that still exists."""
        return self.live.follower is not None and self.live.follower.alive

    def unfollow(self) -> None:
        """Stop counting the steps of an optimizer."""
        if self.live.follower is not None:
            self.live.follower.detach()
        self.live.follower = None

    @property
    def step(self) -> int:
        """The current step: that of the innermost override, or else the step count."""
        return next((o.step for o in reversed(self.live.overrides) if o.step is not None), self.step_count)

    @property
    def multiplier(self) -> float:
        """The schedule's multiplier at the current step."""
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

    def contains_root(self, model: nn.Module) -> bool:
        """Whether `model` contains the whole model that the hooks were placed on, not only a part of it."""
        root = None if self.live.root is None else self.live.root()
        return root is not None and any(module is root for module in model.modules())

    def warn_once(self, kind: str, text: str) -> None:
        """Warn once per kind."""
        if kind not in self.warned_kinds:
            self.warned_kinds.add(kind)
            warn(text)

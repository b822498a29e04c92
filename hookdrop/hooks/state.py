"""What the hooks of one injection share: one object that copies carry along, and one that they never do."""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from hookdrop.errors import warn
from hookdrop.hooks.checkpointing import CheckpointedRates
from hookdrop.hooks.optimizer import Follower
from hookdrop.schedules import ConstantSchedule, Schedule


@dataclass(eq=False)
class Override:
    """What a context puts in force; None leaves the setting as it is."""

    sampling: bool | None = None
    """True: on, in eval mode too. False: off."""
    p: float | None = None
    step: int | None = None
    open: bool = True
    """Whether its context has not ended yet."""


class LiveState:
    """What belongs to this process and this very model; the copy of an injection starts with a new one."""

    def __init__(self) -> None:
        self.root: weakref.ref[nn.Module] | None = None
        """The model that the hooks were placed on; None for a copy."""
        self.members: weakref.WeakSet[Any] = weakref.WeakSet()
        """The hooks, held weakly: a copy of one layer must not drag the others along."""
        self.known_sites: set[str] = set()
        """The sites of all hooks that were ever among the members."""
        self.follower: Follower | None = None
        self.driven = False
        """Whether `step`, `seek` or `follow` has moved the step count in this process."""
        self.moves = 0
        """How often the step count changed."""
        self.trained = False
        """Whether any hook ran in training mode."""
        self.hidden = 0
        """How many `without_hooks` contexts hide the hooks now."""
        self.overrides: list[Override] = []
        """What is in force instead of the settings, innermost last."""
        self.contexts: list[Override] = []
        """All contexts that have not ended."""
        self.observe: Callable[[Any, Tensor, Any], Tensor] | None = None
        """Called with (hook, tensor, rate) in place of the regularizer, while somebody measures or records."""
        self.checkpointed = CheckpointedRates()
        self.watch: Any = None
        """What `diagnostics.watchdog` knows about the training."""

    def __reduce__(self) -> Any:
        return LiveState, ()


class States(weakref.WeakValueDictionary[int, "InjectionState"]):
    """Some states, held weakly; other threads may add to them while they are listed."""

    def add(self, state: InjectionState) -> None:
        """Hold `state`."""
        self[id(state)] = state

    def listed(self) -> list[InjectionState]:
        """Those that exist now."""
        # Iterating a WeakSet fails if another thread adds to it.
        return [state for reference in self.valuerefs() if (state := reference()) is not None]


all_states = States()
"""The states of all hooks that exist."""


@dataclass(eq=False)
class InjectionState:
    """Name, sites, schedule, progress and switches: copied and pickled with the hooks."""

    name: str
    sites: tuple[str, ...]
    schedule: Schedule
    step_count: int = 0
    enabled: bool = True
    removed: bool = False
    warned_kinds: set[str] = field(default_factory=set)
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    """What copies have in common with their original."""
    live: LiveState = field(default_factory=LiveState)

    @property
    def scheduled(self) -> bool:
        """Whether the rate changes only if `step`, `seek` or `follow` is used."""
        return not isinstance(self.schedule, ConstantSchedule)

    @property
    def followed(self) -> bool:
        """Whether an optimizer that still exists counts the steps."""
        return self.live.follower is not None and self.live.follower.alive

    @property
    def step(self) -> int:
        """The step in force: that of a context, or the step count."""
        return next((o.step for o in reversed(self.live.overrides) if o.step is not None), self.step_count)

    @property
    def multiplier(self) -> float:
        """The schedule's multiplier at the step in force."""
        schedule = self.schedule
        return schedule.value if type(schedule) is ConstantSchedule else float(schedule(self.step))

    @property
    def override(self) -> Override | None:
        """The innermost context that switches hooks on or off."""
        for override in reversed(self.live.overrides):
            if override.sampling is not None:
                return override
        return None

    @property
    def on(self) -> bool:
        """Whether hooks work in training mode."""
        override = self.override
        return not self.removed and (self.enabled if override is None else bool(override.sampling))

    @property
    def sampling(self) -> bool:
        """Whether hooks work in eval mode too."""
        return not self.removed and self.override is not None and bool(self.override.sampling)

    @contextmanager
    def overriding(self, override: Override) -> Iterator[None]:
        """`override` is in force inside. Each context removes its own entry, so contexts may exit in any order."""
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

    def switch(self, enabled: bool) -> None:
        """Turn hooks on or off; inside of a context until it ends."""
        self.enabled = enabled
        self.live.overrides = [override for override in self.live.overrides if override.sampling is None]

    def is_whole(self, model: nn.Module) -> bool:
        """Whether `model` contains the whole model that the hooks were placed on, and not a part of it."""
        root = None if self.live.root is None else self.live.root()
        return root is not None and any(module is root for module in model.modules())

    def warn_once(self, kind: str, text: str) -> None:
        """Warn, once of each kind."""
        if kind not in self.warned_kinds:
            self.warned_kinds.add(kind)
            warn(text)

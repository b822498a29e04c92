"""What the hooks of one injection share."""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import nn

from hookdrop.diagnostics.measurement import Meter
from hookdrop.errors import warn
from hookdrop.hooks.checkpointing import Forwards
from hookdrop.hooks.optimizer import Follower
from hookdrop.schedules import Schedule, needs_driving


@dataclass(eq=False)
class Override:
    """What a context says instead of what is set: off, or sampling (on in eval too, at a rate of its own)."""

    sampling: bool
    p: float | None = None
    open: bool = True
    """Whether its context has not ended yet."""


# What belongs to contexts and to this very model: a copy starts without.
_OWN: dict[str, Any] = {
    "driven": False,
    "moves": 0,
    "version": None,
    "seen_version": None,
    "updates": 0,
    "root": None,
    "known": (),
    "follower": None,
    "hidden": 0,
    "overrides": [],
    "contexts": [],
    "meters": [],
    "forwards": None,
    "members": (),
}


@dataclass(eq=False)
class State:
    """Name, places, schedule, where it stands, and what is set; copied and pickled with the hooks."""

    name: str
    sites: tuple[str, ...]
    schedule: Schedule
    step_count: int = 0
    enabled: bool = True
    told: set[str] = field(default_factory=set)
    """The problems that were warned of."""
    removed: bool = False
    driven: bool = False
    """Whether anybody has moved the step count, here and in this process."""
    moves: int = 0
    """How often it was moved."""
    version: int | None = None
    """The version of the model's weights when the hooks were placed."""
    seen_version: int | None = None
    """Their version after the last update that was counted."""
    updates: int = 0
    """Updates of the model's weights since somebody last drove the schedule."""
    root: weakref.ref[nn.Module] | None = None
    """The model that the hooks were placed on."""
    known: set[str] = field(default_factory=set)
    """The sites of all hooks that ever were among the members."""
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    """What copies have in common with their original."""
    follower: Follower | None = None
    hidden: int = 0
    """How many `without_hooks` have the hooks off the model just now."""
    overrides: list[Override] = field(default_factory=list)
    """What is in force instead of `enabled`: the last one."""
    contexts: list[Override] = field(default_factory=list)
    """All contexts that have not ended."""
    meters: list[Meter] = field(default_factory=list)
    forwards: Forwards = field(default_factory=Forwards)
    """What a backward pass may run again."""
    members: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    """The hooks, held weakly: a copy of one layer must not drag the others along."""

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in _OWN}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for key, value in _OWN.items():
            self.__dict__[key] = [] if isinstance(value, list) else value
        self.forwards, self.members, self.known = Forwards(), weakref.WeakSet(), set()

    def join(self, hook: Any) -> None:
        """Have `hook` among the members."""
        self.members.add(hook)
        self.known.add(hook.site)

    @property
    def override(self) -> Override | None:
        """What the innermost context says."""
        return self.overrides[-1] if self.overrides else None

    @property
    def on(self) -> bool:
        """Whether hooks work in training mode."""
        if self.removed:
            return False
        return self.overrides[-1].sampling if self.overrides else self.enabled

    @property
    def sampling(self) -> bool:
        """Whether hooks work in eval mode too."""
        return bool(self.overrides) and self.overrides[-1].sampling

    @cached_property
    def scheduled(self) -> bool:
        """Whether somebody must drive the schedule."""
        return needs_driving(self.schedule)

    @property
    def undriven(self) -> bool:
        """Whether the schedule waits for somebody, and nobody is there."""
        followed = self.follower is not None and self.follower.alive
        return self.scheduled and not self.driven and not followed

    @contextmanager
    def overriding(self, override: Override) -> Iterator[None]:
        """`override` is in force inside; after it all is as it was before.

        Contexts of several threads or generators may end in another order than they began: then each takes away its
        own.
        """
        before = self.enabled, list(self.overrides)
        self.contexts.append(override)
        self.overrides.append(override)
        try:
            yield
        finally:
            override.open = False
            if self.contexts[-1] is override:
                self.enabled, self.overrides = before
            self.contexts = [context for context in self.contexts if context.open]
            self.overrides = [context for context in self.overrides if context.open]

    def is_whole(self, model: nn.Module) -> bool:
        """Whether `model` is all of the model that the hooks were placed on, and not a part of it."""
        root = None if self.root is None else self.root()
        return root is not None and any(module is root for module in model.modules())

    def switch(self, enabled: bool) -> None:
        """On or off from here on; inside of a context until its end."""
        self.enabled, self.overrides = enabled, []

    def tell(self, kind: str, text: str) -> None:
        """Warn, once of each kind."""
        if kind not in self.told:
            self.told.add(kind)
            warn(text)

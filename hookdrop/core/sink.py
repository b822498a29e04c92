"""What an injection drives: anything with a rate, such as a hook or a rate of the dropout that a model already has.

Copies and pickles of a model include its hooks, except that a pickle of a portable injection has entries in their place
that do nothing and need only PyTorch and the standard library to load.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from multiprocessing.context import get_spawning_popen
from typing import Any, Self

from torch import nn
from torch.utils.hooks import RemovableHandle

from hookdrop.core.regularizer import CurrentRate, Rate
from hookdrop.core.torch_internals import HOOK_TABLES


class RateSink:
    """One site of a placed injection. Each kind of site has a class, in `hookdrop.core.parts.KINDS`."""

    site: str
    at: str
    state: Any  # the `InjectionState`
    rate: Rate
    """What the regularizer declares of its rate; of no meaning without a target."""
    p_scale: float
    target: float | None
    """The rate before the schedule and `p_scale`; None without a rate."""
    initial_target: float | None
    called: bool | None = None
    """Whether the layer has been called; None if that is not known."""

    # --- in a plan

    @staticmethod
    def check_site(regularizer: Any, module: nn.Module, tensor: Any, name: str) -> str:
        """Return how the regularizer reads what it gets there, or raise if it cannot act there."""
        return ""

    @staticmethod
    def place_of(module: nn.Module | None, what: Any) -> Any:
        """Identify what a sink or a planned site changes."""
        return id(module), what.at

    @classmethod
    def refuse_beside(cls, site: Any, present: list[RateSink]) -> None:
        """Raise `InjectionError` if a planned site cannot act beside the sinks that are present at its layer."""

    # --- placing and removing

    def __init__(self, site: Any, plan: Any, state: Any) -> None:
        """Create the sink of a `PlannedSite`."""

    def place(self, module: nn.Module) -> None:
        """Begin to act on the module."""

    def take_over(self, replaced: Any) -> None:
        """Restore in the end what those of the `replaced` sinks would that change the same."""

    @property
    def placed(self) -> bool:
        raise NotImplementedError

    @property
    def is_attached(self) -> bool:
        """Whether the sink is placed and its module still exists."""
        raise NotImplementedError

    def remove(self) -> None:
        """Stop, and restore the module."""

    # --- the rate

    @property
    def p(self) -> float | None:
        """The current rate; None without one."""
        raise NotImplementedError

    def set_rate(self, rate: CurrentRate, on: bool, sampling: bool) -> None:
        """Act at this rate in training mode if `on`, and in eval mode if also `sampling`."""

    def valid_target(self, value: object) -> float:
        """Return `value` as a float, or raise if it is out of range."""
        raise NotImplementedError

    def before_sampling(self, model: Callable[[], nn.Module]) -> None:
        """Prepare for acting in eval mode."""

    def describe(self, rate: float | None = None) -> str:
        """Return the regularizer as text, at the given rate or at its target."""
        raise NotImplementedError


# --- hooks


class PlacedHook:
    """A hook that is copied and pickled with its module. It holds its own handle, and no module or model."""

    handle: RemovableHandle | None = None

    @property
    def owner(self) -> Any:
        """The `SiteHook` that this hook belongs to: itself, unless it is a companion."""
        return self

    def remove(self) -> None:
        if self.handle is not None:
            self.handle.remove()
        self.handle = None

    @property
    def placed(self) -> bool:
        """Whether the site hook was placed and not removed."""
        return self.owner.handle is not None

    def was_placed_on(self, module: nn.Module) -> bool:
        """Whether the hook was placed on this module itself, and not registered there again by another library."""
        table = None if self.handle is None else self.handle.hooks_dict_ref()
        return any(getattr(module, name) is table for name, _ in HOOK_TABLES)

    def settle(self, module: nn.Module, *, left_only: bool = False) -> None:
        """End the calls in progress, or only those that an interrupt has left: PyTorch then runs no more hooks."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A process that is started with the model gets the hooks: it trains, and its hookdrop is the same.
        if not self.owner.state.portable or get_spawning_popen() is not None:
            return super().__reduce_ex__(protocol)
        # As a hook, this method ignores its arguments and returns None. Its object holds the handle, because loading a
        # handle reserves its id: a later pre-hook of the same id would be called with this entry's flags.
        return nullcontext(self.handle).__exit__.__reduce__()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the hook completely, also one that pickles leave out."""
        twin = memo[id(self)] = object.__new__(type(self))
        state: Any = copy.deepcopy(self.__getstate__(), memo)
        getattr(twin, "__setstate__", twin.__dict__.update)(state)
        return twin


class CompanionHook(PlacedHook):
    """A further hook of a site, on another module or at another point of the call."""

    owner: Any = None

    def __init__(self, owner: Any, function: Callable[..., Any], *settings: Any) -> None:
        self.owner, self.function, self.settings = owner, function, settings

    def __call__(self, *call: Any) -> Any:
        return self.function(self.owner, *self.settings, *call)

    @property
    def is_attached(self) -> bool:
        table = None if self.handle is None else self.handle.hooks_dict_ref()
        return table is not None and self.handle is not None and self.handle.id in table

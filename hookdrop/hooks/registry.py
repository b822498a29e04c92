"""The base classes of hooks, and how to find, remove and temporarily hide the hooks of a model.

Copies and pickles of a model include its hooks, except that a pickle of a portable injection has entries in their place
that do nothing and need only PyTorch and the standard library to load.

Hooks are found by type, not by the key they were registered under: quantization and fusion re-register the hooks of a
module on its replacement.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any, Self

from torch import nn
from torch.utils.hooks import RemovableHandle

from hookdrop.utils.names import check_model
from hookdrop.utils.torch_internals import HOOK_TABLES

if TYPE_CHECKING:
    from hookdrop.hooks.hook import SiteHook


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

    def settle(self, module: nn.Module) -> None:
        """Undo what an interrupted call (KeyboardInterrupt) has left on the module: PyTorch then runs no more hooks."""

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


hidden_modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules whose hooks are currently hidden by a `without_hooks` context."""


def hooks_of(model: nn.Module) -> Iterator[tuple[nn.Module, SiteHook]]:
    """Yield all hookdrop hooks on `model`, in `named_modules()` order."""
    check_model(model)
    for module in model.modules():
        for name, _ in reversed(HOOK_TABLES):
            for hook in getattr(module, name).values():
                if isinstance(hook, PlacedHook) and not isinstance(hook, CompanionHook):
                    yield module, hook.owner


def remove_hooks(model: nn.Module | None, hooks: Iterable[SiteHook]) -> None:
    """Remove the given hooks from `model` and from the modules that they were placed on."""
    wanted = {id(hook): hook for hook in hooks}
    for module in model.modules() if model is not None else ():
        for table, key in _entries(module):
            if id(owner := getattr(module, HOOK_TABLES[table][0])[key].owner) in wanted:
                owner.settle(module)
                for name in (HOOK_TABLES[table][0], *HOOK_TABLES[table][1]):
                    getattr(module, name).pop(key, None)
    for hook in wanted.values():
        hook.remove()


@contextmanager
def hooks_removed(model: nn.Module) -> Iterator[None]:
    """Remove all hookdrop hooks from `model` inside the context, and restore them with the same order and ids."""
    lives = set()
    for module, hook in hooks_of(model):
        hook.settle(module)
        lives.add(hook.state.live)
    modules = [module for module in model.modules() if _entries(module)]
    tables = []  # (table, previous entries, our hooks in it by key)
    for module in modules:
        for index, (name, extras) in enumerate(HOOK_TABLES):
            ours = {key: getattr(module, name)[key] for which, key in _entries(module) if which == index}
            tables += [(table, dict(table), ours) for table in (getattr(module, each) for each in (name, *extras))]
    for table, _, ours in tables:
        for key in ours:
            table.pop(key, None)
    hidden_modules.update(modules)
    for live in lives:
        live.hidden_count += 1
    try:
        yield
    finally:
        for live in lives:
            live.hidden_count -= 1
        hidden_modules.difference_update(modules)
        for table, before, ours in tables:
            inside = dict(table)
            table.clear()
            # Keep what others added or removed inside the context, and do not restore our hooks that were removed.
            restored = (key for key in before if key in inside or (key in ours and ours[key].placed))
            table.update({key: before[key] for key in restored} | inside)


def _entries(module: nn.Module) -> list[tuple[int, int]]:
    """Return (table index, key) of all hookdrop hooks on this module."""
    return [
        (index, key)
        for index, (name, _) in enumerate(HOOK_TABLES)
        for key, hook in getattr(module, name).items()
        if isinstance(hook, PlacedHook)
    ]

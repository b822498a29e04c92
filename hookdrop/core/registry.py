"""Find, remove and temporarily hide the hooks of a model.

Hooks are found by type, not by the key they were registered under: quantization and fusion re-register the hooks of a
module on its replacement.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from hookdrop.core.hook import SiteHook
from hookdrop.core.selection import check_model
from hookdrop.core.sink import PlacedHook, RateSink
from hookdrop.core.torch_internals import HOOK_TABLES

hidden_modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules whose hooks are currently hidden by a `without_hooks` context."""


def hooks_of(model: nn.Module) -> Iterator[tuple[nn.Module, SiteHook]]:
    """Yield all hookdrop hooks on `model`, in `named_modules()` order."""
    check_model(model)
    for module in model.modules():
        for name, _ in reversed(HOOK_TABLES):
            for hook in getattr(module, name).values():
                if isinstance(hook, SiteHook):
                    yield module, hook


finders: list[Callable[[nn.Module], Iterable[tuple[nn.Module, RateSink]]]] = [hooks_of]
"""Each yields one kind of sinks of a model with their modules, in `named_modules()` order."""


shared_finders: list[Callable[[], Iterable[tuple[nn.Module, RateSink]]]] = []
"""Each yields sinks of all models, which may change something that other models share."""


def sinks_of(model: nn.Module) -> Iterator[tuple[nn.Module, RateSink]]:
    """Yield everything that injections drive in `model`, hooks first."""
    for find in finders:
        yield from find(model)


def remove_sinks(model: nn.Module | None, hooks: Iterable[RateSink]) -> None:
    """Remove hooks from `model` and from the modules that they were placed on, and other sinks from theirs."""
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
        hook.settle(module, left_only=True)
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

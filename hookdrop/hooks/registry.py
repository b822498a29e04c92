"""Hooks on a model: finding them, taking them off, hiding them for a while.

A hook is looked for by what it is, not by the key that it was registered under: quantization and fusion register the
hooks of a module anew on its successor.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from hookdrop.diagnostics.judge import Judge
from hookdrop.hooks.checkpointing import Forwards
from hookdrop.hooks.hook import SiteHook
from hookdrop.hooks.skip_hook import GiveBack, Hook, owner_of

_TABLES = (
    ("_forward_hooks", ("_forward_hooks_with_kwargs", "_forward_hooks_always_called")),
    ("_forward_pre_hooks", ("_forward_pre_hooks_with_kwargs",)),
)

hidden_modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules whose hooks a `without_hooks` has off just now."""


def hooks_of(model: nn.Module) -> Iterator[tuple[nn.Module, SiteHook]]:
    """Every hook of hookdrop on `model`, in `named_modules()` order."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model must be a torch.nn.Module, got {type(model).__name__}.")
    for module in model.modules():
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            if isinstance(hook, SiteHook):
                yield module, hook


def take_off(model: nn.Module | None, hooks: Iterable[SiteHook]) -> None:
    """Take these hooks off `model`, and off the modules that they were placed on."""
    wanted = {id(hook): hook for hook in hooks}
    for module in model.modules() if model is not None else ():
        for table, key in _entries(module):
            if id(owner_of(getattr(module, _TABLES[table][0])[key])) in wanted:
                for name in (_TABLES[table][0], *_TABLES[table][1]):
                    getattr(module, name).pop(key, None)
    for hook in wanted.values():
        hook.remove()


@contextmanager
def hidden(model: nn.Module) -> Iterator[None]:
    """None of hookdrop's hooks is on `model` inside; their order and ids are what they were after."""
    states = {hook.state for _, hook in hooks_of(model)}
    modules = [module for module in model.modules() if _entries(module)]
    taken = [_hide(module) for module in modules]
    hidden_modules.update(modules)
    for state in states:
        state.hidden += 1
    try:
        yield
    finally:
        for state in states:
            state.hidden -= 1
        for module, tables in zip(modules, taken, strict=True):
            hidden_modules.discard(module)
            _show(tables)


@contextmanager
def unmarked(model: nn.Module) -> Iterator[None]:
    """The forwards inside leave no mark on any hook: not that it ran, nor in which mode."""
    hooks = [hook for _, hook in hooks_of(model)]
    before = [(hook.fired, hook.looked_at, hook.judge, hook.seen) for hook in hooks]
    forwards = {hook.state: hook.state.forwards for hook in hooks}
    for hook in hooks:
        hook.judge, hook.state.forwards = Judge(), Forwards()
    try:
        yield
    finally:
        for hook, mark in zip(hooks, before, strict=True):
            hook.fired, hook.looked_at, hook.judge, hook.seen = mark
        for state, kept in forwards.items():
            state.forwards = kept


def _entries(module: nn.Module) -> list[tuple[int, int]]:
    """(which table, key) of every hook of ours on this module."""
    return [
        (index, key)
        for index, (name, _) in enumerate(_TABLES)
        for key, hook in getattr(module, name).items()
        if isinstance(hook, SiteHook | GiveBack)
    ]


def _hide(module: nn.Module) -> list[tuple[dict[int, Any], dict[int, Any], dict[int, Hook]]]:
    """(table, all that was in it, our hooks by key), with ours taken out."""
    taken = []
    for index, (name, extras) in enumerate(_TABLES):
        ours = {key: getattr(module, name)[key] for which, key in _entries(module) if which == index}
        for table in (getattr(module, table_name) for table_name in (name, *extras)):
            taken.append((table, dict(table), ours))
    for table, _, ours in taken:
        for key in ours:
            table.pop(key, None)
    return taken


def _show(taken: list[tuple[dict[int, Any], dict[int, Any], dict[int, Hook]]]) -> None:
    for table, before, ours in taken:
        inside = dict(table)
        table.clear()
        # What others took off or put on inside stays so; what was removed of ours is not brought back.
        back = (key for key in before if key in inside or (key in ours and ours[key].placed))
        table.update({key: before[key] for key in back})
        table.update(inside)

"""Copies and pickles of hooks.

Both include the hooks, except that a pickle of a portable injection has entries in their place that do nothing and need
only PyTorch and the standard library to load.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from multiprocessing.context import get_spawning_popen
from typing import Any, TypeVar

from torch.utils.hooks import RemovableHandle

T = TypeVar("T")


def reduced(portable: bool, handle: RemovableHandle | None) -> Any:
    """What a hook is pickled as instead of itself, or None to pickle the hook.

    A process that is started with the model gets the hooks: it trains, and its hookdrop is the same.
    """
    if not portable or get_spawning_popen() is not None:
        return None
    # As a hook, this method ignores its arguments and returns None. Its object holds the handle, because loading a
    # handle reserves its id: a later pre-hook of the same id would be called with this entry's flags.
    return nullcontext(handle).__exit__.__reduce__()


def deep_copied(hook: T, memo: dict[int, Any]) -> T:
    """Copy a hook completely, also one that pickles leave out."""
    twin = memo[id(hook)] = object.__new__(type(hook))
    state: Any = copy.deepcopy(hook.__getstate__(), memo)
    restore = getattr(twin, "__setstate__", twin.__dict__.update)
    restore(state)
    return twin

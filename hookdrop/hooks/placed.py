"""The base classes of hooks: registration, copies and pickles.

Copies and pickles of a model include its hooks, except that a pickle of a portable injection has entries in their place
that do nothing and need only PyTorch and the standard library to load.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any, TypeVar

from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from hookdrop.hooks.hook import SiteHook

H = TypeVar("H", bound="PlacedHook")


class PlacedHook:
    """A hook that is copied and pickled with its module. It holds its own handle, and no module or model."""

    handle: RemovableHandle | None = None

    @property
    def owner(self) -> SiteHook:
        """The site hook that this hook belongs to, possibly itself."""
        raise NotImplementedError

    def remove(self) -> None:
        """Remove the hook from its module."""
        if self.handle is not None:
            self.handle.remove()
        self.handle = None

    @property
    def placed(self) -> bool:
        """Whether the site hook was placed and not removed."""
        return self.owner.handle is not None

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A process that is started with the model gets the hooks: it trains, and its hookdrop is the same.
        if not self.owner.state.portable or get_spawning_popen() is not None:
            return super().__reduce_ex__(protocol)
        # As a hook, this method ignores its arguments and returns None. Its object holds the handle, because loading a
        # handle reserves its id: a later pre-hook of the same id would be called with this entry's flags.
        return nullcontext(self.handle).__exit__.__reduce__()

    def __deepcopy__(self: H, memo: dict[int, Any]) -> H:
        """Copy the hook completely, also one that pickles leave out."""
        twin = memo[id(self)] = object.__new__(type(self))
        state: Any = copy.deepcopy(self.__getstate__(), memo)
        getattr(twin, "__setstate__", twin.__dict__.update)(state)
        return twin


class CompanionHook(PlacedHook):
    """A further hook of a site, on another module or at another point of the call."""

    def __init__(self, owner: SiteHook) -> None:
        self._owner = owner

    @property
    def owner(self) -> SiteHook:
        return self._owner

    @property
    def is_attached(self) -> bool:
        """Whether the hook is still registered."""
        table = None if self.handle is None else self.handle.hooks_dict_ref()
        return table is not None and self.handle is not None and self.handle.id in table

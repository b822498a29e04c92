"""Further hooks of a site, on other modules or at other points of the call."""

from __future__ import annotations

from typing import Any

from torch.utils.hooks import RemovableHandle

from hookdrop.hooks.hook import SiteHook
from hookdrop.hooks.portable import deep_copied, reduced


class CompanionHook:
    """Base class of hooks that a site hook needs besides its own."""

    def __init__(self, owner: SiteHook) -> None:
        self.owner = owner
        self.handle: RemovableHandle | None = None

    def remove(self) -> None:
        """Remove the hook from its module."""
        if self.handle is not None:
            self.handle.remove()
        self.handle = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduced(self.owner.state.portable, self.handle) or super().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompanionHook:
        return deep_copied(self, memo)

    @property
    def placed(self) -> bool:
        """Whether the owner was placed and not removed."""
        return self.owner.placed

    @property
    def is_attached(self) -> bool:
        """Whether the hook is still registered."""
        table = None if self.handle is None else self.handle.hooks_dict_ref()
        return table is not None and self.handle is not None and self.handle.id in table


Hook = SiteHook | CompanionHook


def owner_of(hook: Hook) -> SiteHook:
    """Return the site hook that `hook` belongs to."""
    return hook.owner if isinstance(hook, CompanionHook) else hook

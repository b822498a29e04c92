"""The hook of an identity skip, which has no module of its own.

A pre-hook on the block passes D(x) on and keeps x; a pre-hook on the first layer of the residual branch gives x back.
The block's own addition then makes f(x) + D(x), in every dtype as if D were a layer on the skip.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.utils.hooks import RemovableHandle

from hookdrop.errors import InjectionError
from hookdrop.hooks import InputHook, SiteHook
from hookdrop.regularizers import Regularizer
from hookdrop.state import State
from hookdrop.values import TensorKey

_KEPT = "_hookdrop_skipped"
"""On D(x), what x was: it goes when D(x) goes, and no two threads or forwards share it."""


class SkipHook(InputHook):
    """A forward pre-hook on a residual block that regularizes what the identity skip carries, and nothing else."""

    at = "skip"

    def __init__(
        self, site: str, regularizer: Regularizer, p_scale: float, tensor: TensorKey, state: State, branch: str
    ) -> None:
        self.branch = branch
        """Where the residual branch begins: the name of its first layer within the block."""
        self.kept: Tensor | None = None
        """x in compiled code, between the two pre-hooks; never in eager code, and never outside of a forward."""
        self.giver: RemovableHandle | None = None
        super().__init__(site, regularizer, p_scale, tensor, state)

    def place(self, module: nn.Module) -> None:
        super().place(module)
        # Before anybody else's: what they do to the branch's input they do to x.
        self.giver = module.get_submodule(self.branch).register_forward_pre_hook(GiveBack(self), prepend=True)

    def remove(self) -> None:
        super().remove()
        if self.giver is not None:
            self.giver.remove()
        self.giver = None

    @property
    def sits_somewhere(self) -> bool:
        return super().sits_somewhere and self.gives_back

    @property
    def gives_back(self) -> bool:
        """Whether somebody will give x back to the branch."""
        table = None if self.giver is None else self.giver.hooks_dict_ref()
        return table is not None and self.giver is not None and self.giver.id in table

    def regularize(self, x: Tensor) -> Tensor:
        y = super().regularize(x)
        if y is x:
            return x
        if is_compiling():
            self.kept = x
        elif not self.gives_back:
            raise InjectionError(
                f"{self.where}: {self.branch!r}, where the residual branch of it began, was replaced after inject: the "
                'branch would be given what the skip carries.\n  inject again with on_existing="replace".'
            )
        else:
            setattr(y, _KEPT, x)
        return y


class GiveBack:
    """A forward pre-hook on the first layer of a residual branch: it is given what the block was."""

    def __init__(self, owner: SkipHook) -> None:
        self.owner = owner

    def __call__(self, module: nn.Module, args: Any) -> Any:
        if is_compiling():
            x, self.owner.kept = self.owner.kept, None
        else:
            x = getattr(args[0], _KEPT, None) if args else None
        return None if x is None else (x, *args[1:])

    @property
    def placed(self) -> bool:
        """Whether its owner was placed and not removed."""
        return self.owner.placed


Hook = SiteHook | GiveBack


def owner_of(hook: Hook) -> SiteHook:
    """The hook of the site that `hook` belongs to."""
    return hook.owner if isinstance(hook, GiveBack) else hook

"""The hook of an identity skip, which has no module of its own.

A pre-hook on the block passes D(x) on and keeps x; a pre-hook on the first layer of the residual branch gives x back.
The block's own addition then makes f(x) + D(x), in every dtype as if D were a layer on the skip.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.utils.hooks import RemovableHandle

from hookdrop.errors import InjectionError
from hookdrop.hooks.hook import InputHook, Rate, SiteHook
from hookdrop.hooks.state import InjectionState
from hookdrop.regularizers.base import Regularizer
from hookdrop.utils.tensor_tree import TensorKey
from hookdrop.utils.torch_internals import graph_task

_KEPT = "_hookdrop_skipped"
"""On D(x), what x was: it goes when D(x) goes, and no two threads or forwards share it."""


class _Kept(NamedTuple):
    """What a tensor was before a skip's hook made another of it; no copy and no pickle of the tensor has it."""

    owner: SkipHook
    x: Tensor

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()


class SkipHook(InputHook):
    """A forward pre-hook on a residual block that regularizes what the identity skip carries, and nothing else."""

    at = "skip"

    def __init__(
        self, site: str, regularizer: Regularizer, p_scale: float, tensor: TensorKey, state: InjectionState, branch: str
    ) -> None:
        self.branch = branch
        """Where the residual branch begins: the name of its first layer within the block."""
        self.kept: Tensor | None = None
        """x from compiled code, between the two pre-hooks; never from eager code, and never outside of a forward."""
        self.awaits = False
        """Whether x is out, from eager code, and was not given back: what compiled code can see of `waiting`."""
        self.waiting: set[int] = set()
        """The threads in which it is so."""
        self.entered: set[int] = set()
        """The threads in which a checkpoint runs the block again, and has not come to the branch."""
        self.giver: RemovableHandle | None = None
        super().__init__(site, regularizer, p_scale, tensor, state)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "kept": None, "awaits": False, "waiting": set(), "entered": set()}

    def __call__(self, module: nn.Module, args: Any, kwargs: Any = None) -> Any:
        if not is_compiling():
            if self.waiting:  # of a forward that did not come to the branch
                self._is_given()
            if graph_task() != -1:
                self.entered.add(threading.get_ident())
        return super().__call__(module, args, kwargs)

    def place(self, module: nn.Module) -> None:
        super().place(module)
        # Before anybody else's: what they do to the branch's input they do to x.
        self.giver = module.get_submodule(self.branch).register_forward_pre_hook(
            RestoreInputHook(self), prepend=True, with_kwargs=True
        )

    def remove(self) -> None:
        super().remove()
        if self.giver is not None:
            self.giver.remove()
        self.giver = None

    @property
    def is_attached(self) -> bool:
        return super().is_attached and self.gives_back

    @property
    def gives_back(self) -> bool:
        """Whether somebody will give x back to the branch."""
        table = None if self.giver is None else self.giver.hooks_dict_ref()
        return table is not None and self.giver is not None and self.giver.id in table

    def apply_in_graph(self, x: Tensor, rate: Rate) -> Tensor:
        y = super().apply_in_graph(x, rate)
        if y is not x:
            self.kept = x
        return y

    def apply(self, x: Tensor, rate: Rate) -> Tensor:
        y = super().apply(x, rate)
        if y is x:
            return x
        if not self.gives_back:
            raise InjectionError(
                f"{self.where}: {self.branch!r}, where the residual branch of it began, was replaced after inject: the "
                'branch would be given what the skip carries.\n  inject again with on_existing="replace".'
            )
        self._lend(x, y)
        return y

    def _lend(self, x: Tensor, y: Tensor) -> None:
        before = getattr(x, _KEPT, None)
        if before is not None and before.owner.site != self.site:
            # A block that adds in place gives D(x) out: what it kept would be kept by all that follow.
            delattr(x, _KEPT)
        setattr(y, _KEPT, _Kept(self, x))
        self.waiting.add(threading.get_ident())
        self.awaits = True

    def _is_given(self) -> None:
        self.waiting.discard(threading.get_ident())
        self.awaits = bool(self.waiting)

    def give(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The branch's arguments with x in them, or None if they are what they are to be."""
        if is_compiling():
            if self.kept is None and self.awaits:
                raise InjectionError(_not_given_text(self))
            x, self.kept = self.kept, None
            return None if x is None else ((x, *args[1:]), kwargs)
        if any(map(self._lent, (*args, *kwargs.values()))):
            self._is_given()
            self.entered.discard(threading.get_ident())
            args = tuple(getattr(value, _KEPT).x if self._lent(value) else value for value in args)
            return args, {name: getattr(v, _KEPT).x if self._lent(v) else v for name, v in kwargs.items()}
        if self.kept is not None:  # The block's pre-hook ran in compiled code, and this one does not.
            x, self.kept = self.kept, None
            return (x, *args[1:]), kwargs
        if threading.get_ident() in self.waiting or self._is_run_again(module):
            self._is_given()
            raise InjectionError(_not_given_text(self))
        return None

    def _lent(self, value: Any) -> bool:
        kept = getattr(value, _KEPT, None) if isinstance(value, Tensor) else None
        return kept is not None and kept.owner is self

    def _is_run_again(self, module: nn.Module) -> bool:
        """Whether a checkpoint inside of the block runs the branch again, on a copy of what the skip carries."""
        if graph_task() == -1:
            return False
        around = threading.get_ident() in self.entered
        self.entered.discard(threading.get_ident())
        rate = self.train_rate
        return module.training and rate is not None and not rate.neutral and not around


class RestoreInputHook:
    """A forward pre-hook on the first layer of a residual branch: it is given what the block was."""

    def __init__(self, owner: SkipHook) -> None:
        self.owner = owner

    def __call__(self, module: nn.Module, args: Any, kwargs: Any = None) -> Any:
        given = self.owner.give(module, args, kwargs or {})
        # Registered anew by somebody else it may be called without the keywords, and must then return none.
        return given[0] if given is not None and kwargs is None else given

    @property
    def placed(self) -> bool:
        """Whether its owner was placed and not removed."""
        return self.owner.placed


def _not_given_text(hook: SkipHook) -> str:
    return (
        f"{hook.where}: what the skip carries came to {hook.branch!r} as another tensor than it left this hook, so "
        "that the residual branch would not be given the block's own input.\n"
        "  a hook of somebody else, or an injection at the block's input: place it before this one\n"
        "  a checkpoint inside of the block: torch.utils.checkpoint(..., use_reentrant=False), or around the block\n"
        f"  the block does something before {hook.branch!r}, or one of the two is compiled alone: leave this site out"
    )


Hook = SiteHook | RestoreInputHook


def owner_of(hook: Hook) -> SiteHook:
    """The hook of the site that `hook` belongs to."""
    return hook.owner if isinstance(hook, RestoreInputHook) else hook

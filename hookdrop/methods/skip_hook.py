"""The hook of an identity skip."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.compiler import is_compiling

from hookdrop.core.errors import InjectionError
from hookdrop.core.regularizer import CurrentRate
from hookdrop.core.state import InjectionState
from hookdrop.core.torch_internals import graph_task
from hookdrop.methods.around import Around

_SAVED_INPUT = "_hookdrop_skipped"
"""The attribute of D(x) that holds x. It lives as long as D(x), so a checkpoint of the branch finds it too."""


class _SavedInput(NamedTuple):
    """x and its hook, stored on D(x). Becomes None in copies and pickles of D(x)."""

    owner: SkipHook
    x: Tensor

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()


class SkipHook(Around):
    """A forward pre-hook on a residual block that regularizes only the identity skip, which has no module to hook.

    It replaces the input x with D(x), where D is the regularizer, and saves x. A pre-hook on the first layer of the
    residual branch restores x, which a call remembers until then. The addition in the block then computes f(x) + D(x),
    as if D were a layer on the skip.
    """

    def __init__(self, site: Any, plan: Any, state: InjectionState) -> None:
        self.branch: str = site.branch  # the name, relative to the block, of the first layer of the residual branch
        super().__init__(site, plan, state)

    def place(self, module: nn.Module, **order: bool) -> None:
        super().place(module)
        # Prepended, so that other pre-hooks on the branch receive x.
        register = module.get_submodule(self.branch).register_forward_pre_hook
        self.restoring = self.accompany(register, SkipHook.restore, prepend=True, with_kwargs=True)

    @property
    def is_attached(self) -> bool:
        return super().is_attached and self.restoring.is_attached

    def apply_in_graph(self, x: Tensor, rate: CurrentRate, **context: Any) -> Tensor:
        y = super().apply_in_graph(x, rate, **context)
        if y is not x:
            self.calls.replace(x)
        return y

    def apply(self, x: Tensor, rate: CurrentRate, **context: Any) -> Tensor:
        y = self.act(x, rate, **context)
        if y is x:
            return x
        if not self.restoring.is_attached:
            raise InjectionError(
                f"{self.where}: {self.branch!r}, the first layer of the residual branch, was replaced after inject, so "
                'the branch would receive the regularized input.\n  inject again with on_existing="replace".'
            )
        before = getattr(x, _SAVED_INPUT, None)
        if before is not None and before.owner.site != self.site:
            # x is the D(x) of an earlier block that added in place. Its saved input is no longer needed.
            delattr(x, _SAVED_INPUT)
        setattr(y, _SAVED_INPUT, _SavedInput(self, x))
        self.calls.replace(x)
        return y

    def restore(self, module: nn.Module, args: Any, kwargs: Any = None) -> Any:
        """Return the arguments of the branch with x restored, or None if they need no change."""
        named, x = kwargs or {}, self.calls.value
        if not is_compiling():
            if any(map(self._holds_input, (*args, *named.values()))):
                args = tuple(self._restored(value) for value in args)
                named = {name: self._restored(value) for name, value in named.items()}
                self.calls.replace(None)
                # If another library re-registered the hook without kwargs, it must return only `args`.
                return args if kwargs is None else (args, named)
            rate, in_block = self.train_rate, bool(self.calls.stack)
            drops = module.training and rate is not None and not rate.neutral
            # Outside of the block, a checkpoint recomputes only the branch, on a copy of D(x).
            if x is not None if in_block else drops and graph_task() != -1:
                raise InjectionError(
                    f"{self.where}: the block modified its input before {self.branch!r}, so the residual branch cannot "
                    "recover the original input.\n"
                    "  another hook or injection at the block's input: place it before this one\n"
                    "  a checkpoint inside the block: torch.utils.checkpoint(..., use_reentrant=False), or checkpoint "
                    "the block\n"
                    f"  the block computes something before {self.branch!r}: exclude this site"
                )
        if x is None:
            return None
        self.calls.replace(None)  # compiled code does not follow the attribute of D(x)
        return (x, *args[1:]) if kwargs is None else ((x, *args[1:]), kwargs)

    def _holds_input(self, value: Any) -> bool:
        saved = getattr(value, _SAVED_INPUT, None) if isinstance(value, Tensor) else None
        return saved is not None and saved.owner is self

    def _restored(self, value: Any) -> Any:
        return getattr(value, _SAVED_INPUT).x if self._holds_input(value) else value

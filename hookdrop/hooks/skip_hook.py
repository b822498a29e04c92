"""The hook of an identity skip, which has no module to hook.

A pre-hook on the block replaces the input x with D(x), where D is the regularizer, and saves x. A pre-hook on the
first layer of the residual branch restores x. The addition in the block then computes f(x) + D(x), as if D were a
layer on the skip.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.compiler import is_compiling

from hookdrop.hooks.hook import CurrentRate, SiteHook
from hookdrop.hooks.registry import CompanionHook
from hookdrop.hooks.state import InjectionState
from hookdrop.regularizers.base import Regularizer
from hookdrop.utils.errors import InjectionError
from hookdrop.utils.tensor_tree import TensorKey
from hookdrop.utils.torch_internals import graph_task

_SAVED_INPUT = "_hookdrop_skipped"
"""The attribute of D(x) that holds x. It lives as long as D(x), and threads and forwards do not share it."""


class _SavedInput(NamedTuple):
    """x and its hook, stored on D(x). Becomes None in copies and pickles of D(x)."""

    owner: SkipHook
    x: Tensor

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()


class SkipHook(SiteHook):
    """A forward pre-hook on a residual block that regularizes only the identity skip."""

    own = (*SiteHook.own, "saved_input", "restore_pending", "pending_threads", "recomputing_threads")

    def __init__(
        self, site: str, regularizer: Regularizer, p_scale: float, tensor: TensorKey, state: InjectionState, branch: str
    ) -> None:
        self.branch = branch
        """The name, relative to the block, of the first layer of the residual branch."""
        self.companion = RestoreInputHook(self)
        super().__init__(site, regularizer, p_scale, tensor, state, "skip")

    def _start(self) -> None:
        self.saved_input: Tensor | None = None
        """x, saved by a compiled pre-hook of the block until the pre-hook of the branch takes it; otherwise None."""
        self.restore_pending = False
        """Whether `pending_threads` is not empty, as a bool that compiled code can read."""
        self.pending_threads: set[int] = set()
        """Threads in which eager code has replaced x and not restored it yet."""
        self.recomputing_threads: set[int] = set()
        """Threads in which a checkpoint recomputes the block and has not reached the branch yet."""
        super()._start()

    def __call__(self, module: nn.Module, args: Any, *rest: Any) -> Any:
        if not is_compiling():
            if self.pending_threads:  # left by a forward that did not reach the branch
                self._clear_pending()
            if graph_task() != -1:
                self.recomputing_threads.add(threading.get_ident())
        return super().__call__(module, args, *rest)

    def place(self, module: nn.Module) -> None:
        super().place(module)
        # Prepended, so that other pre-hooks on the branch receive x.
        self.companion.handle = module.get_submodule(self.branch).register_forward_pre_hook(
            self.companion, prepend=True, with_kwargs=True
        )
        self.companions.append(self.companion)

    @property
    def is_attached(self) -> bool:
        return super().is_attached and self.companion.is_attached

    def apply_in_graph(self, x: Tensor, rate: CurrentRate, **context: Any) -> Tensor:
        y = super().apply_in_graph(x, rate, **context)
        if y is not x:
            self.saved_input = x
        return y

    def apply(self, x: Tensor, rate: CurrentRate, **context: Any) -> Tensor:
        y = super().apply(x, rate, **context)
        if y is x:
            return x
        if not self.companion.is_attached:
            raise InjectionError(
                f"{self.where}: {self.branch!r}, the first layer of the residual branch, was replaced after inject, so "
                'the branch would receive the regularized input.\n  inject again with on_existing="replace".'
            )
        before = getattr(x, _SAVED_INPUT, None)
        if before is not None and before.owner.site != self.site:
            # x is the D(x) of an earlier block that added in place. Its saved input is no longer needed.
            delattr(x, _SAVED_INPUT)
        setattr(y, _SAVED_INPUT, _SavedInput(self, x))
        self.pending_threads.add(threading.get_ident())
        self.restore_pending = True
        return y

    def _clear_pending(self) -> None:
        self.pending_threads.discard(threading.get_ident())
        self.restore_pending = bool(self.pending_threads)

    def restore(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the arguments of the branch with x restored, or None if they need no change."""
        if is_compiling():
            if self.saved_input is None and self.restore_pending:
                raise InjectionError(_input_not_restored_text(self))
            x, self.saved_input = self.saved_input, None
            return None if x is None else ((x, *args[1:]), kwargs)
        if any(map(self._holds_input, (*args, *kwargs.values()))):
            self._clear_pending()
            self.recomputing_threads.discard(threading.get_ident())
            args = tuple(getattr(value, _SAVED_INPUT).x if self._holds_input(value) else value for value in args)
            return args, {name: getattr(v, _SAVED_INPUT).x if self._holds_input(v) else v for name, v in kwargs.items()}
        if self.saved_input is not None:  # The block's pre-hook ran in compiled code, this one runs in eager code.
            x, self.saved_input = self.saved_input, None
            return (x, *args[1:]), kwargs
        if threading.get_ident() in self.pending_threads or self._is_recomputed(module):
            self._clear_pending()
            raise InjectionError(_input_not_restored_text(self))
        return None

    def _holds_input(self, value: Any) -> bool:
        saved = getattr(value, _SAVED_INPUT, None) if isinstance(value, Tensor) else None
        return saved is not None and saved.owner is self

    def _is_recomputed(self, module: nn.Module) -> bool:
        """Whether a checkpoint recomputes only the branch, on a copy of D(x). Clears the mark of this thread."""
        if graph_task() == -1:
            return False
        whole_block = threading.get_ident() in self.recomputing_threads
        self.recomputing_threads.discard(threading.get_ident())
        rate = self.train_rate
        return module.training and rate is not None and not rate.neutral and not whole_block


class RestoreInputHook(CompanionHook):
    """A forward pre-hook on the first layer of a residual branch that restores the input of the block."""

    owner: SkipHook

    def __call__(self, module: nn.Module, args: Any, kwargs: Any = None) -> Any:
        restored = self.owner.restore(module, args, kwargs or {})
        # If another library re-registered the hook, it may be called without kwargs and must then return only `args`.
        return restored[0] if restored is not None and kwargs is None else restored


def _input_not_restored_text(hook: SkipHook) -> str:
    return (
        f"{hook.where}: the block modified its input before {hook.branch!r}, so the residual branch cannot recover the "
        "original input.\n"
        "  another hook or injection at the block's input: place it before this one\n"
        "  a checkpoint inside the block: torch.utils.checkpoint(..., use_reentrant=False), or checkpoint the block\n"
        f"  the block computes something before {hook.branch!r}, or only one of the two is compiled: exclude this site"
    )

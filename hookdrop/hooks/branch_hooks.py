"""The hooks of an identity skip and of a residual branch that runs on some of the samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from hookdrop.hooks.call_context import CallValue, refuse_cache
from hookdrop.hooks.compiling import GraphBreak
from hookdrop.hooks.hook import CurrentRate, SiteHook
from hookdrop.hooks.state import InjectionState
from hookdrop.regularizers.base import Regularizer
from hookdrop.utils.errors import InjectionError, ShapeError
from hookdrop.utils.tensor_tree import TensorKey, bind_arguments, describe, first_tensor, fits, map_leaves, map_tensor
from hookdrop.utils.torch_internals import graph_task

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


class SkipHook(SiteHook):
    """A forward pre-hook on a residual block that regularizes only the identity skip, which has no module to hook.

    It replaces the input x with D(x), where D is the regularizer, and saves x. A pre-hook on the first layer of the
    residual branch restores x. The addition in the block then computes f(x) + D(x), as if D were a layer on the skip.
    """

    own = (*SiteHook.own, "skipped")

    def __init__(
        self, site: str, regularizer: Regularizer, p_scale: float, tensor: TensorKey, state: InjectionState, branch: str
    ) -> None:
        self.branch = branch  # the name, relative to the block, of the first layer of the residual branch
        super().__init__(site, regularizer, p_scale, tensor, state, "skip")

    def _start(self) -> None:
        self.skipped = CallValue()  # x, in calls of the block, until the branch takes it
        super()._start()

    def place(self, module: nn.Module) -> None:
        super().place(module)
        # Prepended, so that other pre-hooks on the branch receive x.
        register = module.get_submodule(self.branch).register_forward_pre_hook
        self.restoring = self.accompany(register, SkipHook.restore, prepend=True, with_kwargs=True)
        self.accompany(module.register_forward_hook, SkipHook.end_call, always_call=True)

    @property
    def is_attached(self) -> bool:
        return super().is_attached and self.restoring.is_attached

    def __call__(self, module: nn.Module, args: Any, *rest: Any) -> Any:
        self.skipped.start(None)
        return super().__call__(module, args, *rest)

    def apply_in_graph(self, x: Tensor, rate: CurrentRate, **context: Any) -> Tensor:
        y = super().apply_in_graph(x, rate, **context)
        if y is not x:
            self.skipped.replace(x)
        return y

    def apply(self, x: Tensor, rate: CurrentRate, **context: Any) -> Tensor:
        y = super().apply(x, rate, **context)
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
        self.skipped.replace(x)
        return y

    def restore(self, module: nn.Module, args: Any, kwargs: Any = None) -> Any:
        """Return the arguments of the branch with x restored, or None if they need no change."""
        named, x = kwargs or {}, self.skipped.value
        if not is_compiling():
            if any(map(self._holds_input, (*args, *named.values()))):
                args = tuple(self._restored(value) for value in args)
                named = {name: self._restored(value) for name, value in named.items()}
                self.skipped.replace(None)
                # If another library re-registered the hook without kwargs, it must return only `args`.
                return args if kwargs is None else (args, named)
            rate, in_block = self.train_rate, bool(self.skipped.stack)
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
        self.skipped.replace(None)  # compiled code does not follow the attribute of D(x)
        return (x, *args[1:]) if kwargs is None else ((x, *args[1:]), kwargs)

    def end_call(self, *_: Any) -> None:
        self.skipped.end()

    def _holds_input(self, value: Any) -> bool:
        saved = getattr(value, _SAVED_INPUT, None) if isinstance(value, Tensor) else None
        return saved is not None and saved.owner is self

    def _restored(self, value: Any) -> Any:
        return getattr(value, _SAVED_INPUT).x if self._holds_input(value) else value


class SubsetHook(SiteHook):
    """A forward pre-hook on a residual branch that passes on some of the samples, so that the others cost nothing.

    A hook on the output of the branch puts the rows of these samples back among zeros.
    """

    own = (*SiteHook.own, "selected")

    def _start(self) -> None:
        self.selected = CallValue()  # the rows, the number of samples and the rate of the call in progress
        super()._start()

    def __call__(self, module: nn.Module, args: Any, *rest: Any) -> Any:
        if not is_compiling():
            self.selected.end()  # left by a compiled branch that raised an error
        return super().__call__(module, args, *rest)

    def _call(self, module: nn.Module, value: Any, rate: CurrentRate | None) -> Any:
        self.selected.end()  # the same, below a graph break
        return super()._call(module, value, rate)

    def _call_in_graph(self, module: nn.Module, value: Any, rate: CurrentRate | None) -> Any:
        return None if rate is None else _SELECT.call(self, module, value, rate)

    def is_off(self, module: nn.Module) -> bool:
        return (self.train_rate if module.training else self.eval_rate) is None

    def map(self, module: nn.Module, value: Any, fn: Callable[..., Tensor]) -> Any:
        args, kwargs = value
        bound = bind_arguments(module, args, kwargs)
        x = first_tensor(bound)
        kept = fn(x)
        if kept is x:
            return None
        refuse_cache(bound, self.where)
        rows = self.selected.value[0]
        return map_leaves(value, lambda leaf: kept if leaf is x else self._select(leaf, rows, x))

    def apply(self, x: Tensor, rate: CurrentRate, **context: Any) -> Tensor:
        """Return the rows of the samples that the branch runs on; `x` itself if it runs on all of them."""
        regularizer: Any = self.regularizer
        rows = regularizer.select_rows(x, rate.value)
        if rows is None:
            return x
        self.selected.start((rows, len(x), rate))
        return x[rows]

    def _select(self, leaf: Any, rows: Tensor, x: Tensor) -> Any:
        """Return the kept rows of another argument of the branch, if it has one row for each sample."""
        samples = len(x)
        if leaf is None or isinstance(leaf, bool | int | float | str | torch.dtype | torch.device):
            return leaf
        if not isinstance(leaf, Tensor):
            raise InjectionError(
                f"{self.where}: the branch also receives a {type(leaf).__name__}, whose samples cannot be selected.\n"
                '  use DropPath(p=..., mode="row"), which runs the branch on all samples'
            )
        if leaf.dim() == 0 or len(leaf) == 1 or len(leaf) % samples:
            return leaf
        # Otherwise it may have one row for each token, or be a bias (H, L, L) of as many heads.
        is_row = len(leaf) == samples and (x.dim() < 3 or x.shape[1] != samples)
        is_row &= not (leaf.dim() == 3 and leaf.shape[1] == leaf.shape[2])
        if not is_row:
            raise ShapeError(
                f"got {describe(x)} and another argument {describe(leaf)}, which may or may not have one row for each "
                f"of the {samples} samples.\n"
                '  use another batch size, or DropPath(p=..., mode="row"), which runs the branch on all samples'
            )
        return leaf[rows]

    def complete(self, output: Any) -> Any:
        """Return the output of the branch for all samples, with zeros for those that it did not run on."""
        selected = self.selected.end()
        if selected is None or output is None:  # None after an error
            return None
        rows, samples, rate = selected

        def complete(leaf: Any) -> Any:
            if not fits(leaf) or len(leaf) != len(rows):
                return leaf
            shape, is_dense = (samples, *leaf.shape[1:]), leaf.stride(0) * len(leaf) == leaf.numel()
            zeros = leaf.new_empty_strided(shape, leaf.stride()).zero_() if is_dense else leaf.new_zeros(shape)
            return zeros.index_copy_(0, rows, leaf)

        # Other tensors with a single row may be for all samples, such as the position bias of T5.
        output = map_tensor(output, self.tensor, complete) if len(rows) == 1 else map_leaves(output, complete)
        return map_tensor(output, self.tensor, lambda y: SiteHook.apply(self, y, rate, rows=rows))

    def end_call(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not is_compiling():
            return self.complete(output)
        return None if self.is_off(module) else _COMPLETE.call(self, output)

    @property
    def where(self) -> str:
        return f"{self.regularizer.title} at {self.site!r}"

    def place(self, module: nn.Module) -> None:
        super().place(module)
        self.accompany(module.register_forward_hook, SubsetHook.end_call, always_call=True)


# The number of rows depends on the rate, so these functions run outside of compiled graphs.
_REASON = "DropPath(mode='subset') changes the batch size of the branch.\n  remove fullgraph=True, or use mode='row'."
_SELECT = GraphBreak(SubsetHook._call, _REASON)
_COMPLETE = GraphBreak(SubsetHook.complete, _REASON)

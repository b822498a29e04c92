"""A hook that runs a residual branch on some of the samples, so that the others cost nothing.

A pre-hook on the branch passes on the rows of the kept samples, and a hook on its output puts them back among zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from hookdrop.hooks.call_context import CallValue, refuse_cache
from hookdrop.hooks.compiling import GraphBreak
from hookdrop.hooks.hook import CurrentRate, SiteHook
from hookdrop.hooks.registry import CompanionHook
from hookdrop.utils.errors import InjectionError, ShapeError
from hookdrop.utils.tensor_tree import bind_arguments, describe, first_tensor, fits, map_leaves, map_tensor


class SubsetHook(SiteHook):
    """A forward pre-hook on a residual branch that selects samples. Its companion completes the output."""

    own = (*SiteHook.own, "selected")

    def _start(self) -> None:
        self.selected = CallValue()
        """The rows, the number of samples and the rate of the call in progress."""
        super()._start()

    def _call(self, module: nn.Module, value: Any) -> Any:
        self.selected.end()  # left by a compiled branch that raised an error
        return super()._call(module, value)

    def _call_in_graph(self, module: nn.Module, value: Any) -> Any:
        return None if self.is_off(module) else _SELECT.call(self, module, value)

    def is_off(self, module: nn.Module) -> bool:
        """Whether the hook does nothing in the mode of the branch."""
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
            return _among_zeros(leaf, rows, samples) if fits(leaf) and len(leaf) == len(rows) else leaf

        # Other tensors with a single row may be for all samples, such as the position bias of T5.
        output = map_tensor(output, self.tensor, complete) if len(rows) == 1 else map_leaves(output, complete)
        return map_tensor(output, self.tensor, lambda y: SiteHook.apply(self, y, rate, rows=rows))

    @property
    def where(self) -> str:
        return f"{self.regularizer.title} at {self.site!r}"

    def place(self, module: nn.Module) -> None:
        super().place(module)
        companion = CompleteBatchHook(self)
        companion.handle = module.register_forward_hook(companion, always_call=True)
        self.companions.append(companion)


def _among_zeros(x: Tensor, rows: Tensor, samples: int) -> Tensor:
    """Return `samples` rows in the memory format of `x`: those of `x` at `rows`, and zeros elsewhere."""
    shape, is_dense = (samples, *x.shape[1:]), x.stride(0) * len(x) == x.numel()
    zeros = x.new_empty_strided(shape, x.stride()).zero_() if is_dense else x.new_zeros(shape)
    return zeros.index_copy_(0, rows, x)


class CompleteBatchHook(CompanionHook):
    """A forward hook on a residual branch that completes its output, and ends the call after an error."""

    owner: SubsetHook

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not is_compiling():
            return self.owner.complete(output)
        return None if self.owner.is_off(module) else _COMPLETE.call(self.owner, output)


# The number of rows depends on the rate, so these functions run outside of compiled graphs.
_REASON = "DropPath(mode='subset') changes the batch size of the branch.\n  remove fullgraph=True, or use mode='row'."
_SELECT = GraphBreak(SubsetHook._call, _REASON)
_COMPLETE = GraphBreak(SubsetHook.complete, _REASON)

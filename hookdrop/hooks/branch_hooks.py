"""The hooks of an identity skip and of a residual branch that runs on some of the samples."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn
from torch.compiler import is_compiling

from hookdrop.hooks.call_context import CallValue, refuse_cache
from hookdrop.hooks.compiling import GraphBreak
from hookdrop.hooks.hook import CurrentRate, SiteHook
from hookdrop.hooks.registry import hooks_removed
from hookdrop.hooks.state import InjectionState
from hookdrop.regularizers.base import Regularizer
from hookdrop.utils.errors import InjectionError
from hookdrop.utils.tensor_tree import (
    TensorKey,
    bind_arguments,
    describe,
    first_tensor,
    map_leaves,
    map_tensor,
    tensors,
    with_rows,
)
from hookdrop.utils.torch_internals import graph_task

if TYPE_CHECKING:
    from hookdrop.survey.subsets import Subset

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

    A hook on the output of the branch puts the rows of these samples back among zeros. What else the branch returns is
    either an argument, of which it then returns all rows, or the same for any samples. If this is false or unknown, it
    runs on all samples.
    """

    own = (*SiteHook.own, "current", "subsets")

    def _start(self) -> None:
        self.current = CallValue()  # the rows, the rate, and what is known of the call in progress
        self.subsets: dict[Any, Subset] = {}
        super()._start()

    def __call__(self, module: nn.Module, args: Any, *rest: Any) -> Any:
        if not is_compiling():
            self.current.end()  # left by a compiled branch that raised an error
        return super().__call__(module, args, *rest)

    def _call(self, module: nn.Module, value: Any, rate: CurrentRate | None) -> Any:
        self.current.end()  # the same, below a graph break
        return super()._call(module, value, rate)

    def _call_in_graph(self, module: nn.Module, value: Any, rate: CurrentRate | None) -> Any:
        return None if rate is None else _SELECT.call(self, module, value, rate)

    def is_off(self, module: nn.Module) -> bool:
        return (self.train_rate if module.training else self.eval_rate) is None

    def map(self, module: nn.Module, value: Any, fn: Callable[..., Tensor]) -> Any:
        bound = bind_arguments(module, *value)
        x = first_tensor(bound)
        fn(x)
        if (current := self.current.end()) is None:
            return None
        refuse_cache(bound, self)
        subset = self._subset(module, value, x)
        rows = current[0]
        chosen, originals = with_rows(value, () if subset.obstacle else subset.arguments, rows)
        self.current.start((*current, len(x), subset, originals))
        return chosen

    def apply(self, x: Tensor, rate: CurrentRate, **context: Any) -> Tensor:
        """Draw the samples that the branch runs on."""
        regularizer: Any = self.regularizer
        rows = regularizer.select_rows(x, rate.value)
        if rows is not None:
            self.current.start((rows, rate))
        return x

    def _subset(self, module: nn.Module, value: Any, x: Tensor) -> Subset:
        """Return what the branch needs in calls of this kind; in the first one, a run without values shows it."""
        from hookdrop.survey.subsets import find_subset  # only this needs it

        kind: list[Any] = []

        def note(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                size = len(leaf) if leaf.dim() else 0
                kind.append((leaf.dim(), leaf.dtype, size == len(x), size == 1))
            else:
                kind.append(leaf if isinstance(leaf, bool | str) else type(leaf))
            return leaf

        map_leaves(value, note)
        key = tuple(kind)
        if key not in self.subsets:
            with ExitStack() as stack:
                for part in module.children():
                    stack.enter_context(hooks_removed(part))
                self.subsets[key] = find_subset(module, value, x, self.tensor)
        return self.subsets[key]

    def complete(self, output: Any) -> Any:
        """Return the output of the branch for all samples, with zeros for those that it did not run on."""
        current = self.current.end()
        if current is None or output is None:  # None after an error
            return None
        rows, rate, samples, subset, originals = current
        if subset.obstacle:
            self.state.warn_once(
                "all samples",
                f"{self.where}: the branch {subset.obstacle}, so it runs on all samples, and saves no time there.\n"
                f"  {_ROW_MODE}; or hook a module that returns one tensor and begins without inplace=True\n"
                '  in transformers, attn_implementation="sdpa" returns no weights',
            )
        elif len(tensors(output)) != subset.outputs:
            raise InjectionError(
                f"{self.where}: the branch returns {describe(output)}, but {subset.outputs} tensors in eval mode, so "
                f"it is unknown what depends on the samples.\n  {_ROW_MODE}"
            )

        def complete(y: Tensor) -> Tensor:
            if not subset.obstacle:
                shape, is_dense = (samples, *y.shape[1:]), y.stride(0) * len(y) == y.numel()
                zeros = y.new_empty_strided(shape, y.stride()).zero_() if is_dense else y.new_zeros(shape)
                y = zeros.index_copy_(0, rows, y)
            return SiteHook.apply(self, y, rate, rows=rows)

        output = map_leaves(output, lambda leaf: originals.get(id(leaf), (leaf, leaf))[1])
        return map_tensor(output, self.tensor, complete)

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


_ROW_MODE = 'use mode="row", which runs the branch on all samples'

# The number of rows depends on the rate, so these functions run outside of compiled graphs.
_REASON = "DropPath(mode='subset') changes the batch size of the branch.\n  remove fullgraph=True, or use mode='row'."
_SELECT = GraphBreak(SubsetHook._call, _REASON)
_COMPLETE = GraphBreak(SubsetHook.complete, _REASON)

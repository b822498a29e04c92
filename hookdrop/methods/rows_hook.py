"""The hook of a layer that runs on the samples that are kept: `LayerDrop`, and `DropPath(mode="subset")`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from hookdrop.core.compiling import graph_break
from hookdrop.core.errors import InjectionError
from hookdrop.core.hook import SiteHook
from hookdrop.core.registry import hooks_removed
from hookdrop.core.regularizer import CurrentRate
from hookdrop.core.selection import named_layers
from hookdrop.core.sink import RateSink
from hookdrop.core.state import InjectionState
from hookdrop.core.tables import some
from hookdrop.core.tensor_tree import (
    bind_arguments,
    describe,
    first_tensor,
    fits,
    leaves,
    map_leaves,
    map_tensor,
    tensors,
)
from hookdrop.core.torch_internals import functorch_stack, is_fake, version_of
from hookdrop.methods.around import Around
from hookdrop.methods.calls import partial_calls
from hookdrop.regularizers.samples import with_rows

if TYPE_CHECKING:
    from hookdrop.survey.subsets import Subset


MOST_KINDS = 64  # of the calls of a layer whose needs are remembered


class _Call(NamedTuple):
    """A call in progress that drops."""

    rate: CurrentRate
    samples: int
    rows: Tensor | None = None
    """The samples that are kept; None for all."""
    is_drawn: bool = False
    """Whether the samples are drawn; otherwise, where nothing can read a value, the regularizer draws afterwards."""
    runs_on: Tensor | None = None
    """Those that the layer runs on; None for all."""
    subset: Subset | None = None
    originals: Mapping[int, tuple[Tensor, Tensor]] = MappingProxyType({})
    inputs: Sequence[tuple[str, Tensor, Tensor]] = ()
    """What a dropped sample may return instead: the name of the argument, the tensor, and what holds its values."""
    containers: Sequence[Any] = ()
    """The arguments that the layer may change and return, after which its caller may read either."""


class RowsHook(Around):
    """A forward pre-hook that draws the samples of a layer and passes on only these, so that the others cost nothing.

    A hook on the output puts the result back. The other rows are zeros or, if the regularizer needs the `layer_input`,
    those of the input. If no sample is kept, the layer runs on one, whose result is not used: its parameters get
    gradients of zero, so DistributedDataParallel misses none. What else the layer returns is either an argument, of
    which it then returns all rows, or the same for any samples. If this is false or unknown, it runs on all samples.
    """

    not_copied = (*Around.not_copied, "subsets", "select", "put_back")
    nested = "and would skip samples of samples.\n  hook a layer inside it."

    def __init__(self, site: Any, plan: Any, state: InjectionState) -> None:
        super().__init__(site, plan, state)
        self.at = "input"

    @staticmethod
    def place_of(module: nn.Module | None, what: Any) -> Any:
        return id(module), "output"  # what it changes, although it begins at the input

    @classmethod
    def refuse_beside(cls, site: Any, present: Sequence[RateSink]) -> None:
        for sink in present if "rows" in site.regularizer.needs else ():
            if isinstance(sink, SiteHook) and "rows" in sink.regularizer.needs:
                raise InjectionError(
                    f"{sink.where} skips samples of this layer already, and a part of a part cannot be put back.\n"
                    "  use one of them, or hook another layer"
                )

    def _start(self) -> None:
        self.subsets: dict[Any, Subset] = {}
        self.returns_input = "layer_input" in self.regularizer.needs
        super()._start()
        # The number of rows depends on the draws.
        reason = self.regularizer.graph_break or "It needs the input of the layer.\n  remove fullgraph=True."
        self.select, self.put_back = graph_break(Around.begin, reason), graph_break(Around.finish, reason)

    @property
    def where(self) -> str:
        return f"{self.regularizer.title} at {self.site!r}" if self.site else f"{self.regularizer.title} at the model"

    # --- before the layer

    def begin_in_graph(self, module: nn.Module, *call: Any) -> Any:
        return None if self.is_off(module) else self.select.call(self, None, False, module, *call)

    def end_in_graph(self, module: nn.Module, output: Any) -> Any:
        return None if self.is_off(module) else self.put_back.call(self, module, output)

    def is_off(self, module: nn.Module) -> bool:
        rate = self.train_rate if module.training else self.eval_rate
        return rate is None or rate.neutral

    def apply(self, x: Tensor, rate: CurrentRate, **context: Any) -> Tensor:
        """Draw the samples that the layer runs on."""
        regularizer: Any = self.regularizer
        if "rows" not in regularizer.needs or functorch_stack() is not None or is_fake(x) or x.is_meta:
            self.calls.replace(_Call(rate, len(x)))
        else:
            self.calls.replace(_Call(rate, len(x), regularizer.select_rows(x, rate.value), is_drawn=True))
        return x

    def map(self, module: nn.Module, value: Any, fn: Callable[..., Tensor]) -> Any:
        bound = bind_arguments(module, *value)
        named = getattr(self.regularizer, "argument", None)
        if named is not None and not any(map(fits, tensors(bound.get(named)))):
            raise InjectionError(f"{self.where}: the layer was called without a tensor {named!r}.")
        x = first_tensor(bound if named is None else bound[named])
        fn(x)
        call: _Call | None = self.calls.value
        if call is None:
            return None
        refuse_cache(bound, self)
        if call.is_drawn and call.rows is None:
            if self.state.live.observe is None:
                self.calls.replace(None)
                return None
            call = call._replace(rows=torch.arange(call.samples, device=x.device))
        rows = call.rows
        if rows is not None and len(rows) < call.samples:
            call = call._replace(subset=(subset := self._subset(module, value, x)))
            if not subset.why_all(discards=not len(rows)):
                runs_on = rows if len(rows) else rows.new_zeros(1)
                value, originals = with_rows(value, subset.arguments, runs_on)
                call = call._replace(runs_on=runs_on, originals=originals)
                partial_calls.start(self)
        if self.returns_input:
            names = bound if named is None else [named]
            given = {id(y): (name, y) for name in names for y in tensors(bound[name]) if fits(y)}
            # A layer that runs on all samples may write to them in place.
            copies = call.runs_on is None
            call = call._replace(inputs=[(name, y, y.clone() if copies else y) for name, y in given.values()])
        call = call._replace(containers=[one for one in bound.values() if isinstance(one, dict | list)])
        self.calls.replace(call)
        return value

    def _subset(self, module: nn.Module, value: Any, x: Tensor) -> Subset:
        """Return what the layer needs in calls of this kind; in the first one, a run without values shows it."""
        from hookdrop.survey.isolation import other_hooks  # only this needs them
        from hookdrop.survey.subsets import HOOKED, find_subset

        if any(map(other_hooks, module.children())):
            return HOOKED  # as long as they are there

        def kind(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                size = len(leaf) if leaf.dim() else 0
                return leaf.dim(), leaf.dtype, size == len(x), size == 1
            return leaf if isinstance(leaf, bool | str | int | float) else type(leaf)

        key = tuple([(path, kind(leaf)) for path, leaf in leaves(bind_arguments(module, *value))])
        if key not in self.subsets:
            if len(self.subsets) >= MOST_KINDS:  # a number that changes in each call
                self.subsets.pop(next(iter(self.subsets)))
            with ExitStack() as stack:
                for part in module.children():
                    stack.enter_context(hooks_removed(part))
                self.subsets[key] = find_subset(module, value, x, self.tensor, writes=self.returns_input)
        return self.subsets[key]

    # --- after the layer

    def end(self, module: nn.Module, call: _Call, output: Any) -> Any:
        """Return the output of the layer for all samples."""
        if call.runs_on is not None:
            partial_calls.end()
        if output is None:
            return None
        if call.subset is not None:
            self._check(call, call.subset, output)

        def finish(y: Tensor) -> Tensor:
            drawn = None if call.runs_on is not None else call.rows
            alone = drawn is not None and (len(drawn) or self.regularizer.independent_samples)
            if alone and len(y) != call.samples:
                raise InjectionError(
                    f"{self.where}: the layer returns {len(y)} rows, but the first tensor that it gets has "
                    f"{call.samples}, so the samples are unknown.\n"
                    "  find them by running the model: inject(..., example_input=x)"
                )
            if call.runs_on is not None and len(y) != call.samples:
                shape, is_dense = (call.samples, *y.shape[1:]), y.stride(0) * len(y) == y.numel()
                zeros = y.new_empty_strided(shape, y.stride()).zero_() if is_dense else y.new_zeros(shape)
                y = zeros.index_copy_(0, call.runs_on, y)
            needed: dict[str, Any] = {"layer_input": self._input(y, output, call)} if self.returns_input else {}
            return self.act(y, call.rate, **needed, **({} if call.rows is None else {"rows": call.rows}))

        def restored(leaf: Any) -> Any:
            new, old = call.originals.get(id(leaf), (leaf, leaf))
            is_argument = new is not old and (new.is_inference() or not version_of(new))
            return old if is_argument else leaf  # one that the layer wrote to is its result

        try:
            result = map_tensor(map_leaves(output, restored), self.tensor, finish)
        except Exception as error:
            self.explain(error)
            raise
        if any(output is one for one in call.containers):
            for key in range(len(output)) if isinstance(output, list) else output:
                output[key] = result[key]
            return output
        return result

    def _check(self, call: _Call, subset: Subset, output: Any) -> None:
        if call.runs_on is None:
            self.state.warn_once(
                "all samples",
                f"{self.where}: the layer {subset.why_all(discards=False)}, so it runs on all samples, and saves no "
                "time there. The result is right.\n"
                "  see which layers run on the kept samples: plan(model, ..., example_input=x)\n"
                "  hook a layer that returns one tensor, begins without inplace=True, and has no batch norm and no "
                "hook of other code inside\n"
                '  in transformers, attn_implementation="sdpa" returns no weights',
            )
        elif len(tensors(output)) != subset.outputs:
            raise InjectionError(
                f"{self.where}: the layer returns {describe(output)}, but {subset.outputs} tensors in a run without "
                "values and gradients, so it is unknown what depends on the samples.\n"
                '  drop what the branches add, which all samples run through: DropPath(p=..., mode="row")'
            )

    def _input(self, y: Tensor, output: Any, call: _Call) -> Tensor:
        """Return the argument that stands for an output `y`: the only one with its shape, or else the first."""
        # A second output of the layer, unlike an argument that it returns, may be a second residual stream.
        given = [id(x) for _, x, _ in call.inputs]
        others = [z for z in tensors(output) if call.runs_on is None and fits(z) and id(z) not in given]
        found = [one for one in call.inputs if any(one[1].shape == z.shape for z in (y, *others))]
        if len(found) > 1:
            several = list(dict.fromkeys(name for name, *_ in found))
            raise InjectionError(
                f"{self.where}: it is unknown which argument a skipped layer returns: {some(several)} have the shape "
                "of an output.\n"
                "  find it by running the model: inject(..., example_input=x)\n"
                f"  or name it: {self.regularizer.title}(..., argument={' or '.join(map(repr, several))})"
            )
        return (found or call.inputs)[0][2]


_CACHES = ("past_key_values", "past_key_value", "layer_past", "past", "cache", "cache_params")


def refuse_cache(bound: dict[str, Any], hook: SiteHook) -> None:
    """Raise `InjectionError` if a call fills a KV cache, which would keep the keys of what is dropped."""
    for name in _CACHES:
        if bound.get(name) is not None:
            raise InjectionError(
                f"{hook.where}: the layer fills a KV cache ({name}), which would hold keys of dropped layers or lack "
                f"rows.\n  {_cache_settings(hook)} = False   or pass use_cache=False to the model"
            )


def _cache_settings(hook: SiteHook) -> str:
    """Return the settings that turn on the cache, those of the configs around a layer."""
    found: dict[int, str] = {}
    root = None if hook.state.live.root is None else hook.state.live.root()
    for layer in [] if root is None else named_layers(root):
        config = getattr(layer.module, "config", None)
        if f"{hook.site}.".startswith(f"{layer.name}." * bool(layer.name)) and getattr(config, "use_cache", False):
            found.setdefault(id(config), ".".join(filter(None, ("model", layer.name, "config.use_cache"))))
    return " = ".join(found.values()) or "model.config.use_cache"

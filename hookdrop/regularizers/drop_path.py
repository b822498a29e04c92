"""Stochastic depth: DropPath, which drops residual branches, and LayerDrop, which skips layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hookdrop.core.arguments import one_of
from hookdrop.core.errors import InjectionError, LayerError, ShapeError
from hookdrop.core.regularizer import BELOW_1, DropRegularizer, P, Rate, SamplePlace
from hookdrop.core.torch_internals import BatchNorm
from hookdrop.kernels.masking import keep_scale, slice_dropout, slice_mask
from hookdrop.kernels.random_numbers import rand
from hookdrop.regularizers.samples import CHOOSE_PLACE, EACH_ROW, SampleRows, place_text, rows_in_call, sample_place

_MODES = ("row", "batch", "subset")


def drop_path(
    x: Tensor,
    p: float | Tensor,
    mode: str = "row",
    training: bool = True,
    *,
    scale: bool = True,
    rows: SampleRows = EACH_ROW,
) -> Tensor:
    """Zero whole samples (`mode="row"`, `"subset"`) or the whole batch, and scale the rest: see `DropPath`.

    `rows` says which rows belong to which sample, if not each row of axis 0 is one.
    """
    one_of(mode, "mode", "drop_path", _MODES)
    one_of(scale, "scale", "drop_path", (True, False))
    p = P.argument(p, x, "drop_path", DropPath.axes)
    if not training or x.numel() == 0 or (not isinstance(p, Tensor) and p == 0.0):
        return x
    rest = (1,) * (x.dim() - 1)
    if mode == "subset":
        # The samples with the smallest of N random numbers.
        least, fraction = _kept(len(x), p)
        order = rand((len(x),), torch.float32, x.device).argsort().argsort()
        one_more = rand((1,), torch.float32, x.device) < fraction
        return _keep(x, (order < least + one_more).view(-1, *rest), keep_scale(p) if scale else 1.0)
    if rows != EACH_ROW:
        kept_N = slice_mask(x, p, (rows.samples(x),))
        return _keep(x, rows.repeat(kept_N, x), keep_scale(p) if scale else 1.0)
    draws = (x.shape[0] if mode == "row" else 1, *rest)
    return slice_dropout(x, p, draws) if scale else x * slice_mask(x, p, draws)


def _keep(x: Tensor, kept: Tensor, scale: float | Tensor) -> Tensor:
    factor = kept.to(torch.promote_types(x.dtype, torch.float32)) * scale
    return (x * factor).to(x.dtype)


def _others(x: Tensor, rows: Tensor) -> Tensor:
    """Return True for the samples other than these rows, in a shape that broadcasts to `x`."""
    dropped = torch.ones(len(x), dtype=torch.bool, device=x.device).index_fill(0, rows, False)
    return dropped.view(-1, *(1,) * (x.dim() - 1))


def _kept(samples: int, p: float | Tensor) -> tuple[Any, Any]:
    """The number of samples that `mode="subset"` keeps at least, and the probability of keeping one more."""
    kept: Any = samples * (1.0 - p) + _ROUNDING
    least = kept.floor() if isinstance(p, Tensor) else int(kept)
    return least, kept - least - _ROUNDING


_GRAPH_BREAK = "The layer runs on the samples that are kept, whose number changes.\n  remove fullgraph=True."
_ROUNDING = 1e-9  # above the error of 1 - p: 10 * (1 - 0.8) is below 2


def _no_rows(what: str, found: object, instead: str) -> LayerError:
    return LayerError(
        f"{what} draws for each sample, but the samples are not its rows: {found}.\n"
        f"  draw once for the batch: {instead}"
    )


class DropPath(DropRegularizer):
    """Zero whole samples with probability `p`, and scale the rest by 1 / (1 - p).

    Hook the last layer of a residual branch, before the addition (a Bottleneck's `bn3`, a transformer's `attn` and
    `mlp`). At the output of a whole block it would also drop the skip connection.

    With `mode="subset"`, hook modules that are a whole branch (a transformer's `attn` and `mlp`): they run only on the
    samples that are kept, which saves their time. Each call keeps N (1 - p) random samples; if this is no integer, the
    next smaller or larger number, such that the mean is N (1 - p). If none is kept, the branch runs on one, whose
    result is not used. Other arguments with one row for each sample, such as attention masks, are selected too: the
    first call finds them by a run of the branch without values. Branches with batch norm are refused, and so are KV
    caches.

    Args:
        p: probability of dropping a sample, in [0, 1].
        mode: `"row"` draws once for each sample, `"batch"` once for the whole batch, `"subset"` which samples the
            branch runs on.
        samples: `(module, axis, interleaved)`, where the samples are in windows, frames or time steps. `inject` finds
            this with `example_input=` (see `SamplePlace`); None: each row of axis 0 is a sample.
        scale: whether kept samples are scaled. False is timm's `scale_by_keep=False`; the mean then shrinks by 1 - p.
        keep_prob: 1 - p, instead of `p`.

    Shape: (N, ...), or any other if `samples` says where the samples are.

    Raises:
        LayerError: in `inject` with `mode="subset"`, if the branch has batch norm; with an example,
            if it is unknown which rows belong to which sample.
        InjectionError: in forward with `mode="subset"`, if the branch returns other tensors than in eval mode.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> DropPath(p=0.5, mode="subset")(torch.ones(8, 1)).flatten()
        tensor([0., 0., 2., 2., 2., 0., 2., 0.])

    Reference: Huang et al. 2016, "Deep networks with stochastic depth", arXiv:1603.09382. `mode="subset"`: Oquab et al.
    2023, "DINOv2", arXiv:2304.07193, section 5, where the number of kept samples is rounded down, and at least 1.
    """

    axes = "N ..."

    def __init__(
        self,
        p: float | None = None,
        mode: str = "row",
        *,
        scale: bool = True,
        samples: SamplePlace | None = None,
        keep_prob: float | None = None,
    ) -> None:
        super().__init__(p, keep_prob=keep_prob)
        self.mode: str = one_of(mode, "mode", self.title, _MODES)
        self.scale: bool = one_of(scale, "scale", self.title, (True, False))
        self.samples = sample_place(samples, self.title)
        if self.samples is not None and self.mode != "row":
            raise ValueError(f"DropPath: samples= only applies to mode='row', got mode={self.mode!r}.")
        if self.mode == "batch":
            self.axes = "..."  # also without samples, as in a PackedSequence
        elif self.mode == "subset":
            self.needs, self.only_at = ("rows",), "output"
        elif self.samples is not None and self.samples[0] is not None:
            self.needs = ("samples",)

    def for_layer(self, model: nn.Module, name: str, at: str = "output", survey: Any = None) -> DropPath:
        if self.mode == "subset":
            branch = model.get_submodule(name)
            norms = [part for part, module in branch.named_modules() if isinstance(module, BatchNorm)]
            if norms:
                raise LayerError(
                    f"DropPath(mode='subset') at {name!r}: {norms[0] or name!r} is a batch norm, whose statistics "
                    'would be those of the kept samples only.\n  use DropPath(p=..., mode="row")'
                )
        if survey is None or self.mode == "batch" or self.samples is not None or name not in survey.layers:
            return self  # the plan reports layers that are never called
        found = survey.samples(name, at)
        if isinstance(found, str) or (found.argument is not None and self.mode == "subset"):
            raise _no_rows(
                f"DropPath(mode={self.mode!r}) at {name!r}", found, f'DropPath(p=..., mode="batch")   {CHOOSE_PLACE}'
            )
        return self if found.argument is None else DropPath(self.p, scale=self.scale, samples=found.argument)

    @property
    def graph_break(self) -> str:
        return _GRAPH_BREAK if self.mode == "subset" else ""

    def reading(self, shape: Sequence[int]) -> str:
        if self.samples is not None:
            return place_text(self.samples, shape)
        if self.mode != "subset":
            return f"N={shape[0]}"
        least, fraction = _kept(shape[0], self.p)
        return f"N={shape[0]}, keeps {least}{f' or {least + 1}' if fraction > _ROUNDING else ''}"

    @property
    def independent_samples(self) -> bool:
        return self.mode == "row" and self.samples is None

    def runs_on(self, survey: Any, name: str, tensor: int | str | None = None) -> str:
        return str(survey.runs_on(name, tensor)) if self.mode == "subset" else ""

    def select_rows(self, x: Tensor, p: float) -> Tensor | None:
        """Draw the samples that a branch runs on; None for all of them."""
        least, fraction = _kept(len(x), p)
        kept = least + int(torch.rand((), dtype=torch.float32, device="cpu") < fraction)  # nothing waits for a GPU
        return None if kept == len(x) and not self.scale else torch.randperm(len(x), device=x.device)[:kept]

    def regularize(self, x: Tensor, rate: Any, rows: Tensor | None = None, samples: SampleRows | None = None) -> Tensor:
        if rows is not None:
            return _keep(x, ~_others(x, rows), keep_scale(rate) if self.scale else 1.0)
        return drop_path(x, rate, self.mode, scale=self.scale, rows=rows_in_call(self.samples, samples))


def layer_drop(output: Tensor, input: Tensor, p: float | Tensor, mode: str = "batch", training: bool = True) -> Tensor:
    """Return the `input` of a layer instead of its `output` with probability `p`, in [0, 1): see `LayerDrop`."""
    one_of(mode, "mode", "layer_drop", _MODES[:2])
    p = BELOW_1.argument(p, output, "layer_drop")
    _require_shape(output.shape, [tuple(input.shape)])
    if not training or (not isinstance(p, Tensor) and p == 0.0):
        return output
    # A tensor, so that nothing waits for its values. The gradients of a skipped layer are zeros.
    draws = (len(output), *(1,) * (output.dim() - 1)) if mode == "row" else ()
    dropped = rand(draws, torch.float32, output.device) < p
    return torch.where(dropped, input.to(output.dtype), output)


def _require_shape(output: Sequence[int], inputs: Sequence[Sequence[int]], where: str = "") -> None:
    if tuple(output) not in inputs:
        raise ShapeError(
            f"{where}got an output {tuple(output)} of an input {inputs[0]}: only a layer that keeps the shape can be "
            "skipped.\n  hook other layers, or drop residual branches: DropPath(p=...)"
        )


class LayerDrop(DropRegularizer):
    """Skip a layer with probability `p`: it returns its input. Nothing is rescaled.

    Hook layers that keep the shape: transformer layers such as `"model.layers.*"`. If a layer returns several tensors,
    the first is replaced. A skipped layer costs almost nothing: it runs on the samples that are kept, or on one of
    them, whose result is not used, if none is. So its parameters get gradients of zero instead of none, and
    DistributedDataParallel needs no `find_unused_parameters`. Each rank draws its own layers. Other arguments with one
    row for each sample, such as attention masks, are selected too: the first call finds them by a run without values.

    A layer with batch norm, that mixes samples or returns more than one tensor for them runs on all samples, and its
    result is discarded: `plan` says so in the column "runs". KV caches are refused.

    Args:
        p: probability of skipping the layer, in [0, 1).
        mode: `"batch"` draws once for each layer and forward, `"row"` once for each sample.
        argument: the name of the argument that a skipped layer returns. `inject` finds it with `example_input=`: the
            output is this argument plus residual branches. None: the only argument with the shape of the output.
        keep_prob: 1 - p, instead of `p`.

    Shape: any; the layer's output has the shape of its input. With `mode="row"`: (N, ...).

    Raises:
        LayerError: in `inject` with an example, if the layer is a residual branch, such as `mlp`, or has several
            residual streams, or, with `mode="row"`, if its samples are not its rows.
        ShapeError: in `inject` with an example, otherwise in forward, if the layer changes the shape.
        InjectionError: in forward, if the layer fills a KV cache, or several arguments have the shape of the output.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> x, fx = torch.zeros(2), torch.ones(2)
        >>> [LayerDrop(p=0.5)(fx, layer_input=x).tolist() for _ in range(4)]
        [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]

    Reference: Fan et al. 2020, "Reducing transformer depth on demand with structured dropout", arXiv:1909.11556.
    """

    rate: ClassVar[Rate] = BELOW_1
    only_at = "output"
    needs = ("rows", "layer_input")

    def __init__(
        self,
        p: float | None = None,
        mode: str = "batch",
        *,
        argument: str | None = None,
        keep_prob: float | None = None,
    ) -> None:
        super().__init__(p, keep_prob=keep_prob)
        self.mode: str = one_of(mode, "mode", self.title, _MODES[:2])
        if not isinstance(argument, str | None):
            raise TypeError(f"LayerDrop: argument must be the name of an argument of the layer, got {argument!r}.")
        self.argument = argument
        if mode == "row":
            self.axes = "N ..."

    def for_layer(self, model: nn.Module, name: str, at: str = "output", survey: Any = None) -> LayerDrop:
        if survey is None:
            return self
        if any(branch.end == name for branch in survey.branches):
            raise LayerError(
                f"LayerDrop at {name!r}: this is a residual branch. Skipped, it would add its input to the stream.\n"
                "  hook the whole layer, or drop the branch: DropPath(p=...)"
            )
        for call in survey.layers.get(name, ()):
            inputs, outputs = ([x.shape for x in nodes if x.fits] for nodes in (call.inputs, call.outputs))
            if inputs and outputs:
                _require_shape(outputs[0], inputs, f"LayerDrop at {name!r} ")
        if self.mode == "row" and name in survey.layers:
            found = survey.samples(name, at)
            if isinstance(found, str) or found.argument is not None:
                raise _no_rows(f"LayerDrop(mode='row') at {name!r}", found, 'LayerDrop(p=..., mode="batch")')
        streams = survey.streams(name)
        if len(streams) > 1:
            raise LayerError(
                f"LayerDrop at {name!r}: the layer has {len(streams)} residual streams, and it would skip the branches "
                "of the first only.\n  drop the branches: DropPath(p=...)"
            )
        arguments: list[str] = next(iter(streams), [])
        if self.argument is not None or not arguments:
            return self
        if len(arguments) > 1:
            raise LayerError(
                f"LayerDrop at {name!r}: the output is a sum of several arguments and of residual branches.\n"
                f"  name the one that a skipped layer returns: LayerDrop(p=..., argument={arguments[0]!r})   "
                f"arguments: {', '.join(arguments)}"
            )
        several = any(sum(x.fits for x in call.inputs) > 1 for call in survey.layers[name])
        return LayerDrop(self.p, self.mode, argument=arguments[0]) if several else self

    @property
    def graph_break(self) -> str:
        return _GRAPH_BREAK

    @property
    def independent_samples(self) -> bool:
        return self.mode == "row"

    def runs_on(self, survey: Any, name: str, tensor: int | str | None = None) -> str:
        return str(survey.runs_on(name, tensor, self.argument, writes=True, discards=self.mode == "batch"))

    def select_rows(self, x: Tensor, p: float) -> Tensor | None:
        """Draw the samples that a layer runs on; None for all of them."""
        # On the CPU, so that nothing waits for an accelerator.
        draws = torch.rand(len(x) if self.mode == "row" else 1, dtype=torch.float32, device="cpu")
        kept = (draws >= p).expand(len(x))
        return None if kept.all() else kept.nonzero()[:, 0].to(x.device)

    def regularize(self, x: Tensor, rate: Any, layer_input: Tensor | None = None, rows: Tensor | None = None) -> Tensor:
        if layer_input is None:
            raise InjectionError(
                "LayerDrop needs the input of the layer too.\n"
                "  inject it: inject(model, LayerDrop(p=...), layers=...)\n"
                "  or call it: LayerDrop(p=...)(layer(x), layer_input=x)"
            )
        if rows is None:
            return layer_drop(x, layer_input, rate, self.mode)
        _require_shape(x.shape, [tuple(layer_input.shape)])
        return torch.where(_others(x, rows), layer_input.to(x.dtype), x)

"""Statistics of every layer's output and gradient, to find vanishing, exploding, dead or saturated signals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from hookdrop.hooks import compiling
from hookdrop.hooks.checkpointing import is_recomputing
from hookdrop.injection.figures import channel_axis
from hookdrop.observe.plots import stats_figure
from hookdrop.survey.isolation import uncompiled
from hookdrop.utils.errors import InjectionError, NotRecordedError, did_you_mean, nothing_placed, warn
from hookdrop.utils.select import Entries, Layer, named_layers, select
from hookdrop.utils.tables import some, text_table
from hookdrop.utils.tensor_tree import tensors
from hookdrop.utils.torch_internals import functorch_stack

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VANISHING, EXPLODING = 1e-3, 1e3  # a signal outside of these multiples of the reference has vanished or exploded
MARGIN = 0.05  # an output is saturated if it is within this fraction of the output range from a bound
RANGES = {nn.Sigmoid: (0.0, 1.0), nn.Hardsigmoid: (0.0, 1.0), nn.Tanh: (-1.0, 1.0), nn.Softsign: (-1.0, 1.0)}
CHANNELS_FIRST = (nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.GroupNorm)
DEAD = 0.1  # so many channels are dead, besides those that are 0 by chance
MAX_DOUBTS_SHOWN = 8
HEADER = ("layer", "type", "calls", "mean", "variance", "grad mean", "grad variance", "grad norm", "dead", "saturated")


@contextmanager
def stats(model: nn.Module, layers: Entries | None = None, *, exclude: Entries = ()) -> Iterator[Stats]:
    """Collect statistics of the forwards inside the `with` block and of their backward passes, in constant memory.

    Args:
        model: any module, wrapped or not.
        layers: the layers to observe, as in `inject`; None is every module without children.
        exclude: layers to skip.

    Yields:
        A dict from the names of the called layers, in the order of their first calls, to `LayerStats`. It has `plot`
        and `doubts`, and `print` shows a table. Layers that return no floating-point tensor are missing.

    Raises:
        LayerError: an entry matches no layer, or the requested layer was not observed or never called.
        InjectionError: a forward inside runs under `torch.func`.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Sigmoid())
        >>> with stats(model) as seen:
        ...     for _ in range(5):
        ...         model(torch.randn(2, 3)).sum().backward()
        >>> seen["1"].calls, 0 < seen["1"].activation.mean < 1, seen["1"].dead
        (5, True, 0.0)
    """
    with nothing_placed():
        compiling.raise_if_tracing("stats()")
        leaves = [layer.module for layer in named_layers(model) if not any(layer.module.children())]
        chosen = select(model, leaves if layers is None else layers, exclude).layers
    seen = Stats(chosen)
    # Compiled code would ignore new hooks, or recompile.
    with uncompiled(), ExitStack() as handles:
        for layer in chosen:
            handles.enter_context(layer.module.register_forward_hook(_ReadOnlyHook(partial(seen._add, layer))))
        yield seen
    if (never := seen.never_called) and (layers is not None or not seen):
        warn(f"stats: these layers never ran, or returned no floating-point tensor: {some(never)}.")


class _ReadOnlyHook:
    """Calls `function(output)` and changes nothing. In copies and pickles of the model it is disabled."""

    def __init__(self, function: Callable[[Any], None] | None = None) -> None:
        self.function = function

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.function is None:
            return
        if functorch_stack() is not None:
            raise InjectionError(
                "stats() cannot be used inside torch.func (vmap, grad, ...): its tensors become invalid after it.\n"
                "  run the model directly inside the `with` block, or use torch.func outside of it."
            )
        self.function(output)

    def __reduce__(self) -> Any:
        return _ReadOnlyHook, ()


class Moments:
    """Running mean and variance of the elements of all added tensors, in float64 (float32 on MPS). Stores no tensor.

    Reference: Chan, Golub, LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample variances".
    """

    def __init__(self) -> None:
        self.count, self.parts = 0, 0  # number of elements and of tensors
        self._mean: Tensor | float = 0.0
        self._deviations: Tensor | float = 0.0
        """Sum of squared deviations from the mean. Both stay on the device, because reading them would synchronize."""

    @torch.no_grad()
    def add(self, x: Tensor) -> None:
        """Add the elements of `x`; for a DTensor, those of this rank."""
        x = _local(x.detach())
        if not x.numel():
            return
        x = x.to(torch.float32 if x.device.type == "mps" else torch.float64)
        var, mean = torch.var_mean(x, correction=0)
        new, total = x.numel(), self.count + x.numel()
        shift = mean - self._mean
        self._mean = self._mean + shift * (new / total)
        self._deviations = self._deviations + var * new + shift * shift * (self.count * new / total)
        self.count, self.parts = total, self.parts + 1

    @property
    def mean(self) -> float:
        """Mean of the elements; NaN without elements."""
        return float(self._mean) if self.count else math.nan

    @property
    def variance(self) -> float:
        """Variance of the elements, as `torch.var(correction=0)`; NaN without elements."""
        return float(self._deviations) / self.count if self.count else math.nan

    @property
    def rms(self) -> float:
        """Root mean square of the elements."""
        return math.sqrt(self.variance + self.mean**2)

    @property
    def norm(self) -> float:
        """L2 norm of a tensor: root mean square over the tensors."""
        return self.rms * math.sqrt(self.count / self.parts) if self.parts else math.nan


class LayerStats:
    """Statistics of one layer: `activation` and `gradient` of its output have `mean`, `variance`, `rms` and `norm`."""

    def __init__(self, layer: Layer) -> None:
        self.name, self.kind, self.calls = layer.name, type(layer.module).__name__, 0
        self.activation, self.gradient = Moments(), Moments()
        self._alive: Tensor | None = None  # bool, one element for each channel: whether it was ever nonzero
        self._channels_vary = False
        self._range = RANGES.get(type(layer.module))
        self._saturated: Tensor | int = 0

    def __repr__(self) -> str:
        numbers = ", ".join(f"{name} {x:.3g}" for name, x in self.numbers().items() if x is not None)
        return f"<LayerStats {self.name or 'the model'} ({self.kind}): {self.calls} calls, {numbers}>"

    @property
    def dead(self) -> float | None:
        """Fraction of channels (or feature units) that were exactly 0 in every element of every call.

        The channels are on the last axis of linear layers and on axis 1 of convolutions and their norms. For other
        layers, the axis is that of the last such layer whose output had this shape, else axis 1 of maps and the last
        axis of tokens and features. None if the output has no channels, or if their number differs between calls.
        """
        return None if self._alive is None or self._channels_vary else float((~self._alive).double().mean())

    @property
    def channels(self) -> int:
        """The number of channels; 0 if there are none."""
        return 0 if self._alive is None else len(self._alive)

    @property
    def per_channel(self) -> int:
        """The number of elements that each channel had in all calls."""
        return self.activation.count // max(1, self.channels)

    @property
    def saturated(self) -> float | None:
        """Fraction of output elements within 5% of the output range from a bound.

        Sigmoid and Hardsigmoid: below 0.05 or above 0.95. Tanh and Softsign: beyond +-0.9. None for all other layers.
        """
        total = self.activation.count
        return float(self._saturated) / total if self._range is not None and total else None

    def numbers(self) -> dict[str, float | None]:
        """Return all statistics by their column in the table."""
        a, g = self.activation, self.gradient
        of_gradient = (g.mean, g.variance, g.norm) if g.count else (None,) * 3
        return dict(zip(HEADER[3:], (a.mean, a.variance, *of_gradient, self.dead, self.saturated), strict=True))

    def add(self, x: Tensor, axis: int) -> None:
        """Add the output of one call, whose channels are on this axis."""
        self.calls += 1
        self.activation.add(x)
        if self._range is not None:
            low, high = self._range
            margin = MARGIN * (high - low)
            self._saturated = self._saturated + ((x <= low + margin) | (x >= high - margin)).sum()
        if x.dim() < 2 or not x.numel():
            return
        alive = (x != 0).movedim(axis, 0).flatten(1).any(1)
        self._channels_vary |= self._alive is not None and self._alive.shape != alive.shape
        if not self._channels_vary:
            self._alive = alive if self._alive is None else self._alive | alive


class Stats(dict[str, LayerStats]):
    """Statistics by layer name, in the order of the first calls; `print` it."""

    def __init__(self, layers: list[Layer]) -> None:
        super().__init__()
        self._names = [layer.name for layer in layers]
        self._axes: dict[tuple[int, ...], int] = {}
        """Channel axes by the shapes that convolutions, norms and linear layers returned."""

    @property
    def never_called(self) -> list[str]:
        """The observed layers without a call."""
        return [name for name in self._names if name not in self]

    def __missing__(self, name: str) -> NoReturn:
        called = f"\n  called: {some(list(self)) or 'none'}"
        if name in self._names:
            raise NotRecordedError(f"{name!r} was not called, or returned no tensor.{called}")
        raise NotRecordedError(f"{name!r} is not an observed layer.{did_you_mean(name, self._names)}{called}")

    def _add(self, layer: Layer, output: Any) -> None:
        """Add one call. From a recomputed forward of a checkpoint, add only the gradient."""
        x = next((x for x in tensors(output) if x.is_floating_point()), None)
        if x is None:
            return
        if layer.name not in self:
            self[layer.name] = LayerStats(layer)
        of_layer = self[layer.name]
        if not is_recomputing():
            shape = tuple(x.shape)
            if isinstance(layer.module, nn.Linear):
                self._axes[shape] = -1
            elif isinstance(layer.module, CHANNELS_FIRST):
                self._axes[shape] = 1
            of_layer.add(_local(x.detach()), self._axes.get(shape, channel_axis(shape)))
        if x.requires_grad:
            x.register_hook(of_layer.gradient.add)  # type: ignore[no-untyped-call]

    def doubts(self) -> list[str]:
        """Return a message for each probable problem.

        An output has vanished or exploded if its root mean square is below 0.001 or above 1000 times that of the first
        layer called; a gradient, if its norm is, compared with the last layer that has a gradient. At least 10% of the
        channels of a layer are dead, beyond those expected by chance, or half of its outputs are saturated.
        """
        found: list[str] = []
        layers = list(self.values())
        last = [layer for layer in layers if layer.gradient.count][-1:]
        for layer in layers:
            signals = [("output", layer.activation.rms, layers[0].activation.rms, layers[0])]
            if layer.gradient.count:
                signals.append(("gradient", layer.gradient.norm, last[0].gradient.norm, last[0]))
            problems = []
            for what, size, of_reference, reference in signals:
                if not math.isfinite(size):
                    problems.append(f"{what} is not finite")
                elif size == 0.0:
                    problems.append(f"{what} is 0 (expected at step 0 around zero-initialized layers)")
                elif size < VANISHING * of_reference or size > EXPLODING * of_reference:
                    verb = "vanishes" if size < of_reference else "explodes"
                    problems.append(f"{what} {verb} ({size:.2g}; at {_name(reference)} {of_reference:.2g})")
            if layer.dead and layer.dead >= DEAD + 0.5**layer.per_channel:
                channels = layer.channels
                problems.append(
                    f"{round(layer.dead * channels)} of {channels} channels are dead (0 in every call: "
                    f"{layer.per_channel} elements each)"
                )
            if (layer.saturated or 0.0) >= 0.5:
                problems.append(f"{layer.saturated:.0%} of outputs are saturated (within 5% of a bound)")
            found += [f"{_name(layer)}: {problem}" for problem in problems]
        return found

    def plot(self, figure: Any = None) -> Figure:
        """Draw output variance, gradient norm, and dead and saturated fractions; in `figure`, or in a new one."""
        return stats_figure(list(self.values()), figure)

    def __repr__(self) -> str:
        if not self:
            return "<no layer was called>"
        rows = [(layer.name, layer.kind, layer.calls, *layer.numbers().values()) for layer in self.values()]
        doubts = self.doubts()
        more = [f"and {len(doubts) - MAX_DOUBTS_SHOWN} more: .doubts()"] if len(doubts) > MAX_DOUBTS_SHOWN else []
        return "\n".join([text_table(HEADER, rows), *doubts[:MAX_DOUBTS_SHOWN], *more])


def _name(layer: LayerStats) -> str:
    return repr(layer.name) if layer.name else "the model itself"


def _local(x: Tensor) -> Tensor:
    return x.to_local() if hasattr(x, "to_local") else x

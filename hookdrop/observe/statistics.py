"""Statistics of every layer's output and gradient, to find vanishing, exploding, dead or saturated signals."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from hookdrop.errors import did_you_mean, warn
from hookdrop.injection.figures import pixels
from hookdrop.observe.layer_statistics import ChannelAxes, LayerStats
from hookdrop.observe.plots import stats_figure
from hookdrop.observe.read_only_hooks import chosen_layers, observed
from hookdrop.utils.context import requires_with
from hookdrop.utils.select import Entries, named_layers
from hookdrop.utils.tables import html_table, some, text_table
from hookdrop.utils.tensors import NotRecordedError
from hookdrop.utils.validation import count

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_DOUBTS_SHOWN = 8
LOWEST_AXIS = -8
"""The lowest accepted `channel_dim`: no layer returns a tensor with more axes."""
HEADER = ("layer", "type", "calls", "mean", "variance", "grad mean", "grad variance", "grad norm", "dead", "saturated")


@requires_with("with stats(model) as seen: model(x)   then seen[name]")
def stats(
    model: nn.Module, layers: Entries | None = None, *, channel_dim: int | None = None, exclude: Entries = ()
) -> Iterator[Stats]:
    """Collect statistics of the forward and backward passes inside the `with` block, in constant memory.

    Args:
        model: any module, wrapped or not.
        layers: the layers to observe, as in `inject`; None is every module without children.
        channel_dim: axis of the channels or units, for `dead`. None is the axis that the layer's class defines
            (convolutions, norms, linear layers), else that of the last such layer whose output had this shape, else
            axis 1 of maps and the last axis of tokens and features.
        exclude: layers to skip.

    Yields:
        A read-only dict from the names of the called layers, in the order of their first calls, to `LayerStats`. It has
        `plot` and `doubts`, and `print` shows a table. Layers that return no floating-point tensor are missing.

    Raises:
        LayerError: an entry matches no layer, or the requested layer was not observed or never called.
        ShapeError: `channel_dim` is not an axis of an output. The forward raises it.
        InjectionError: a forward inside runs under `torch.func`.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Sigmoid())
        >>> with stats(model) as seen:
        ...     for _ in range(5):
        ...         model(torch.randn(2, 3)).sum().backward()
        >>> seen["1"].calls, 0 < seen["1"].mean < 1, seen["1"].dead
        (5, True, 0.0)
    """
    which = (
        [layer.module for layer in named_layers(model) if not any(layer.module.children())]
        if layers is None
        else layers
    )
    axes = ChannelAxes(None if channel_dim is None else count(channel_dim, "channel_dim", "stats", LOWEST_AXIS))
    called: list[LayerStats] = []
    chosen = [LayerStats(layer, axes, called) for layer in chosen_layers(model, which, exclude, "stats()")]
    try:
        with observed([*axes.hooks(model), *((layer.module, layer.look) for layer in chosen)]):
            yield Stats(called, chosen)
    finally:
        for layer in chosen:
            layer.close()
    never = [layer.name for layer in chosen if not layer.calls]
    if never and (layers is not None or not called):
        warn(f"stats: these layers never ran, or returned no floating-point tensor: {some(never)}.")


class Stats(Mapping[str, LayerStats]):
    """Statistics by layer name, in the order of the first calls; `print` it."""

    def __init__(self, called: list[LayerStats], chosen: list[LayerStats]) -> None:
        self._called, self._chosen = called, chosen

    def __getitem__(self, name: str) -> LayerStats:
        for layer in self._called:
            if name in layer.names:
                return layer
        called = f"\n  called: {some([layer.name for layer in self._called]) or 'none'}"
        if any(name in layer.names for layer in self._chosen):
            raise NotRecordedError(f"{name!r} was not called, or returned no floating-point tensor.{called}")
        hint = did_you_mean(name, [layer.name for layer in self._chosen])
        raise NotRecordedError(f"{name!r} is not an observed layer.{hint}{called}")

    def __iter__(self) -> Iterator[str]:
        return (layer.name for layer in self._called)

    def __len__(self) -> int:
        return len(self._called)

    def doubts(
        self, vanishing: float = 1e-3, exploding: float = 1e3, dead: float = 0.5, saturated: float = 0.5
    ) -> list[str]:
        """Return a message for each probable problem.

        `doubts` compares the root mean square of a layer's output with that of the first layer called, and the norm of
        its gradient with that of the last layer that has a gradient.

        Args:
            vanishing: a signal below this fraction of the reference has vanished.
            exploding: a signal above this multiple of the reference, or one that is not finite, has exploded.
            dead: minimum fraction of dead channels to report.
            saturated: minimum fraction of saturated elements to report.
        """
        found = []
        first, last = self._called[:1], [layer for layer in self._called if layer.gradient.count][-1:]
        for layer in self._called:
            for other in first:
                found += _drift(
                    layer, "output", vanishing, exploding, layer.activation.rms, other, other.activation.rms
                )
            for other in last if layer.gradient.count else ():
                found += _drift(
                    layer, "gradient", vanishing, exploding, layer.gradient_norm, other, other.gradient_norm
                )
            if layer.dead is not None and layer.dead >= dead:
                found.append(f"{_name(layer)}: {layer.dead:.0%} of channels are dead (0 in every call)")
            if layer.saturated is not None and layer.saturated >= saturated:
                found.append(f"{_name(layer)}: {layer.saturated:.0%} of outputs are saturated (within 5% of a bound)")
        return found

    def rows(self) -> list[tuple[object, ...]]:
        """Return one row for each layer."""
        return [(layer.name, layer.kind, layer.calls, *_numbers(layer).values()) for layer in self._called]

    def plot(self, figure: Any = None) -> Figure:
        """Draw output variance, gradient norm, and dead and saturated fractions, one row for each layer.

        Args:
            figure: a matplotlib `Figure` or `SubFigure` to draw in, instead of a new one.
        """
        return stats_figure(self._called, figure)

    def log_tensorboard(self, writer: Any, step: int) -> None:
        """Log the statistics of every layer, and the figure.

        Args:
            writer: a `torch.utils.tensorboard.SummaryWriter`, or an object with its `add_scalar` and `add_image`.
            step: global step of the entries.
        """
        for layer in self._called:
            for key, value in _numbers(layer).items():
                if value is not None:
                    writer.add_scalar(f"hookdrop/stats/{layer.name or 'model'}/{key.replace(' ', '_')}", value, step)
        writer.add_image("hookdrop/stats", pixels(self.plot()), step, dataformats="HWC")

    def __repr__(self) -> str:
        if not self:
            return "<no layer was called>"
        doubts = self.doubts()
        more = [f"and {len(doubts) - MAX_DOUBTS_SHOWN} more: .doubts()"] if len(doubts) > MAX_DOUBTS_SHOWN else []
        return "\n".join([text_table(HEADER, self.rows()), *doubts[:MAX_DOUBTS_SHOWN], *more])

    def _repr_html_(self) -> str:
        return html_table(HEADER, self.rows(), "; ".join(self.doubts()) or "outputs and gradients by layer")


def _numbers(layer: LayerStats) -> dict[str, float | None]:
    gradient = (
        (layer.gradient_mean, layer.gradient_variance, layer.gradient_norm) if layer.gradient.count else (None,) * 3
    )
    values = (layer.mean, layer.variance, *gradient, layer.dead, layer.saturated)
    return dict(zip(HEADER[3:], values, strict=True))


def _name(layer: LayerStats) -> str:
    return repr(layer.name) if layer.name else "the model itself"


def _drift(
    layer: LayerStats, what: str, vanishing: float, exploding: float, size: float, other: LayerStats, reference: float
) -> list[str]:
    """Check a signal's size for vanishing and exploding, against the reference of another layer."""
    if not math.isfinite(size):
        return [f"{_name(layer)}: {what} is not finite"]
    if size == 0.0:
        return [f"{_name(layer)}: {what} is 0 (expected at step 0 around zero-initialized layers)"]
    against = f"({size:.2g}; at {_name(other)} {reference:.2g})"
    if size < vanishing * reference:
        return [f"{_name(layer)}: {what} vanishes {against}"]
    return [f"{_name(layer)}: {what} explodes {against}"] if size > exploding * reference else []

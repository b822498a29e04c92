"""Statistics of every layer's output and gradient: where signals vanish, explode, die or saturate."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from hookdrop.diagnostics.figures import pixels
from hookdrop.errors import did_you_mean, warn
from hookdrop.injection.select import Entries, walk
from hookdrop.observe.layer_statistics import ChannelAxes, LayerStats
from hookdrop.observe.plots import stats_figure
from hookdrop.observe.read_only_hooks import chosen_layers, observed
from hookdrop.utils.context import requires_with
from hookdrop.utils.tables import html_table, some, text_table
from hookdrop.utils.tensor_copies import NotRecordedError
from hookdrop.utils.validation import count

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_DOUBTS = 8
LOWEST_AXIS = -8
"""No layer returns a tensor with more axes."""
HEADER = ("layer", "type", "calls", "mean", "variance", "grad mean", "grad variance", "grad norm", "dead", "saturated")


@requires_with("with stats(model) as seen: model(x)   then seen[name]")
def stats(
    model: nn.Module, layers: Entries | None = None, *, channel_dim: int | None = None, exclude: Entries = ()
) -> Iterator[Stats]:
    """Gather statistics of the forwards and backward passes inside, in constant memory.

    Args:
        model: any module, wrapped or not.
        layers: which, as in `inject`; None is every module without children.
        channel_dim: the axis of the channels or units, for `dead`; None is the layer's own, where its class defines it
            (convolutions, norms, linear layers); else that of the last such layer whose output had this shape; else
            axis 1 of maps and the last one of tokens and features.
        exclude: layers to skip.

    Yields:
        A read-only dict from the layers that were called, in the order of their first calls, to `LayerStats`; `print`
        it, `plot` it, and ask it for `doubts`. It has no layers that return no floating-point tensor.

    Raises:
        LayerError: an entry matches no layer; or the requested layer was not observed or never called.
        ShapeError: `channel_dim` is not an axis of an output; raised in the forward.
        InjectionError: a forward inside runs under `torch.func`.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Sigmoid())
        >>> with stats(model) as seen:
        ...     for _ in range(5):
        ...         model(torch.randn(2, 3)).sum().backward()
        >>> seen["1"].calls, 0 < seen["1"].mean < 1, seen["1"].dead
        (5, True, 0.0)
    """
    which = [layer.module for layer in walk(model) if not any(layer.module.children())] if layers is None else layers
    axes = ChannelAxes(None if channel_dim is None else count(channel_dim, "channel_dim", "stats", LOWEST_AXIS))
    called: list[LayerStats] = []
    chosen = [LayerStats(layer, axes, called) for layer in chosen_layers(model, which, exclude, "stats()")]
    try:
        with observed([*axes.hooks(model), *((one.module, one.look) for one in chosen)]):
            yield Stats(called, chosen)
    finally:
        for one in chosen:
            one.close()
    never = [one.name for one in chosen if not one.calls]
    if never and (layers is not None or not called):
        warn(f"never called inside stats(), or without a floating-point output: {some(never)}.")


class Stats(Mapping[str, LayerStats]):
    """Layers by name, in the order of their first calls; `print` it."""

    def __init__(self, called: list[LayerStats], chosen: list[LayerStats]) -> None:
        self._called, self._chosen = called, chosen

    def __getitem__(self, name: str) -> LayerStats:
        for one in self._called:
            if name in one.names:
                return one
        called = f"\n  called: {some([one.name for one in self._called]) or 'none'}"
        if any(name in one.names for one in self._chosen):
            raise NotRecordedError(f"{name!r} was not called, or returned no floating-point tensor.{called}")
        hint = did_you_mean(name, [one.name for one in self._chosen])
        raise NotRecordedError(f"{name!r} is not one of the layers of these stats.{hint}{called}")

    def __iter__(self) -> Iterator[str]:
        return (one.name for one in self._called)

    def __len__(self) -> int:
        return len(self._called)

    def doubts(
        self, vanishing: float = 1e-3, exploding: float = 1e3, dead: float = 0.5, saturated: float = 0.5
    ) -> list[str]:
        """What is probably wrong, one text for each finding.

        A layer's output (root mean square) is compared with that of the first layer called, and its gradient (norm)
        with that of the last layer that has one.

        Args:
            vanishing: a signal below this fraction of it has vanished.
            exploding: a signal above this multiple of it, or one that is not finite, has exploded.
            dead: the fraction of dead channels from which on they are reported.
            saturated: the fraction of saturated elements from which on they are reported.
        """
        found = []
        first, last = self._called[:1], [one for one in self._called if one.gradient.count][-1:]
        for one in self._called:
            for other in first:
                found += _drift(one, "output", vanishing, exploding, one.activation.rms, other, other.activation.rms)
            for other in last if one.gradient.count else ():
                found += _drift(one, "gradient", vanishing, exploding, one.gradient_norm, other, other.gradient_norm)
            if one.dead is not None and one.dead >= dead:
                found.append(f"{_name(one)}: {one.dead:.0%} of its channels are dead (0 in every call)")
            if one.saturated is not None and one.saturated >= saturated:
                found.append(f"{_name(one)}: {one.saturated:.0%} of its output is saturated (within 5 % of an end)")
        return found

    def rows(self) -> list[tuple[object, ...]]:
        """One row for each layer."""
        return [(one.name, one.kind, one.calls, *_numbers(one).values()) for one in self._called]

    def plot(self, figure: Any = None) -> Figure:
        """Variance of the outputs, norm of the gradients, dead and saturated fractions: one line for each layer.

        Args:
            figure: a matplotlib `Figure` or `SubFigure` to draw in, instead of a new one.
        """
        return stats_figure(self._called, figure)

    def log_tensorboard(self, writer: Any, step: int) -> None:
        """Write all statistics of every layer, and the figure.

        Args:
            writer: a `torch.utils.tensorboard.SummaryWriter`, or an object with its `add_scalar` and `add_image`.
            step: the step to write them at.
        """
        for one in self._called:
            for key, value in _numbers(one).items():
                if value is not None:
                    writer.add_scalar(f"hookdrop/stats/{one.name or 'model'}/{key.replace(' ', '_')}", value, step)
        writer.add_image("hookdrop/stats", pixels(self.plot()), step, dataformats="HWC")

    def __repr__(self) -> str:
        if not self:
            return "<no layer was called>"
        doubts = self.doubts()
        more = [f"and {len(doubts) - MOST_DOUBTS} more: .doubts()"] if len(doubts) > MOST_DOUBTS else []
        return "\n".join([text_table(HEADER, self.rows()), *doubts[:MOST_DOUBTS], *more])

    def _repr_html_(self) -> str:
        return html_table(HEADER, self.rows(), "; ".join(self.doubts()) or "outputs and gradients by layer")


def _numbers(one: LayerStats) -> dict[str, float | None]:
    gradient = (one.gradient_mean, one.gradient_variance, one.gradient_norm) if one.gradient.count else (None,) * 3
    values = (one.mean, one.variance, *gradient, one.dead, one.saturated)
    return dict(zip(HEADER[3:], values, strict=True))


def _name(one: LayerStats) -> str:
    return repr(one.name) if one.name else "the model itself"


def _drift(
    one: LayerStats, what: str, vanishing: float, exploding: float, size: float, other: LayerStats, others: float
) -> list[str]:
    """Whether a signal of this size has vanished or exploded compared with another layer's."""
    if not math.isfinite(size):
        return [f"{_name(one)}: its {what} is not finite"]
    if size == 0.0:
        return [f"{_name(one)}: its {what} is 0 (expected at step 0 around layers initialized to 0)"]
    against = f"({size:.2g}; at {_name(other)} {others:.2g})"
    if size < vanishing * others:
        return [f"{_name(one)}: its {what} vanishes {against}"]
    return [f"{_name(one)}: its {what} explodes {against}"] if size > exploding * others else []

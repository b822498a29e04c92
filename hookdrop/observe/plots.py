"""Figures of schedules, tensors and layer statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hookdrop.injection.figures import blocks_figure, evenly_spaced, get_figure
from hookdrop.injection.handle import Injection
from hookdrop.schedules import Schedule
from hookdrop.utils.errors import LayerError
from hookdrop.utils.tables import counted, shape_text
from hookdrop.utils.validation import count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hookdrop.observe.statistics import LayerStats

BLUE, ORANGE = "#2166ac", "#d6604d"
MOST_POINTS = 2000


def plot_features(
    what: Tensor | Mapping[str, Tensor],
    *,
    sample: int = 0,
    channels: int = 8,
    channel_dim: int | None = None,
    figure: Any = None,
) -> Figure:
    """Draw the channels of a layer's output as images, with one color scale for each layer.

    Args:
        what: a tensor, or tensors by layer name, such as the output of torchvision's `create_feature_extractor` (at
            most 6 layers from first to last). A recording has its own `plot_features`.
        sample: index into the batch.
        channels: maximum number of channels of a map. Tokens (N, L, C) and features (N, C) are one image.
        channel_dim: channel axis of a map; None is axis 1, or the last axis of (N, H, W, C) with H = W != C.
        figure: a matplotlib `Figure` or `SubFigure` to draw in, instead of a new one.

    Raises:
        HookdropError: matplotlib is not installed.
        ShapeError: a tensor cannot be shown as images, or the batch has no such sample.
        LayerError: `what` is empty.
    """
    shown = {"": what} if isinstance(what, Tensor) else what
    if not shown:
        raise LayerError("nothing to plot: there is no tensor.")
    titles = {name: ", ".join(filter(None, (name, shape_text(x.shape)))) for name, x in shown.items()}
    blocks = {titles[name]: {"": shown[name]} for name in evenly_spaced(list(shown))}
    return blocks_figure(
        blocks, sample=sample, channels=channels, channel_dim=channel_dim, figure=figure, total=len(shown)
    )


def plot_schedule(
    what: Schedule | Injection, steps: int, *, total_steps: int | None = None, figure: Any = None
) -> Figure:
    """Draw a rate over optimizer steps.

    Args:
        what: a schedule, to draw its multiplier; or an injection, to draw each distinct rate of its sites, with
            keep_prob = 1 - p on the right if the rate is a probability, and a line at the current step.
        steps: last step of the plot, at least 1; the first is step 0.
        total_steps: the length of the training, for a schedule with fractions of it.
        figure: a matplotlib `Figure` or `SubFigure` to draw in, instead of a new one.

    Raises:
        HookdropError: matplotlib is not installed.
        InjectionError: the schedule has fractions, and `total_steps` is missing.
    """
    steps = count(steps, "steps", "plot_schedule")
    schedule = what.schedule if isinstance(what, Injection) else what
    multipliers = schedule.simulate(steps + 1, total_steps)
    # Subsample long schedules, but keep the last step.
    at = sorted({*range(0, steps + 1, max(1, steps // MOST_POINTS)), steps})
    figure = get_figure(figure, 5.5, 3.2)
    axes = figure.subplots()
    axes.set_xlabel("optimizer steps", fontsize=9)
    axes.set_title(repr(schedule), fontsize=9, wrap=True)
    axes.tick_params(labelsize=8)
    if isinstance(what, Injection):
        _draw_rates(axes, what, at, multipliers)
    else:
        axes.plot(at, [multipliers[i] for i in at], color=BLUE)
        axes.set_ylabel("multiplier of the target rate", fontsize=9)
    axes.margins(x=0)
    axes.set_ylim(bottom=0)
    return figure  # type: ignore[no-any-return]


def _draw_rates(axes: Axes, injection: Injection, at: list[int], multipliers: list[float]) -> None:
    targets: dict[float, list[str]] = {}
    for hook in injection._sinks:
        if hook.target is not None:
            targets.setdefault(hook.target * hook.p_scale, []).append(hook.site)
    for target, sites in sorted(targets.items(), reverse=True):
        label = sites[0] if len(sites) == 1 else counted(len(sites), "site")
        axes.plot(at, [target * multipliers[i] for i in at], label=f"target rate {target:.3g}: {label}")
    if len(targets) > 1:
        axes.legend(fontsize=8, frameon=False)
    axes.axvline(injection.step_count, color="gray", linewidth=1, linestyle=":")
    axes.set_ylabel("rate" if injection.keep_prob is None else "p")
    if injection.keep_prob is not None:
        complement: Any = lambda p: 1 - p  # noqa: E731
        right = axes.secondary_yaxis("right", functions=(complement, complement))
        right.set_ylabel("keep_prob = 1 - p", fontsize=9)
        right.tick_params(labelsize=8)


def stats_figure(layers: Sequence[LayerStats], figure: Any = None) -> Figure:
    """Draw variances, gradient norms and fractions in three columns, one row for each layer."""
    if not layers:
        raise LayerError("nothing to plot: no layer was called.")
    figure = get_figure(figure, 9.0, 1.2 + min(0.22, 16 / len(layers)) * len(layers))
    table = figure.subplots(1, 3, sharey=True)
    lines = range(len(layers))
    columns = {
        "variance of the output": [layer.activation.variance for layer in layers],
        "norm of the gradient": [layer.gradient.norm for layer in layers],
    }
    for axes, (title, values) in zip(table, columns.items(), strict=False):
        axes.plot(values, lines, "o-", color=BLUE, markersize=4)
        if any(value > 0 for value in values):
            axes.set_xscale("log", nonpositive="mask")
        axes.set_xlabel(title, fontsize=9)
    # Matplotlib draws None as a gap.
    table[2].plot([layer.dead for layer in layers], lines, "o", color=ORANGE, label="dead channels")
    table[2].plot([layer.saturated for layer in layers], lines, "s", color=BLUE, label="saturated elements")
    table[2].set_xlim(-0.03, 1.03)
    table[2].set_xlabel("fraction", fontsize=9)
    table[2].legend(fontsize=8, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    table[0].set_yticks(lines, [f"{layer.name or 'the model'} ({layer.kind})" for layer in layers])
    table[0].set_ylim(len(layers) - 0.5, -0.5)
    for axes in table:
        axes.grid(axis="y", color="#eeeeee")
        axes.tick_params(labelsize=min(8.0, 8.0 * 16 / (0.22 * len(layers))))
    return figure  # type: ignore[no-any-return]

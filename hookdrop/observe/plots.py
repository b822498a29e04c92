"""Figures of schedules, captured tensors and layer statistics."""

from __future__ import annotations

import math
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
    what: Tensor | Mapping[str, Sequence[Any]],
    *,
    sample: int = 0,
    channels: int = 8,
    channel_dim: int | None = None,
    figure: Any = None,
) -> Figure:
    """Draw the channels of a layer's output as images, with one color scale for each layer.

    Args:
        what: a tensor; the result of `capture` (the last call of each layer, at most 6 layers from first to last), or
            its `inputs` or `gradients`. A recording has its own `plot_features`.
        sample: index into the batch.
        channels: maximum number of channels of a map. Tokens (N, L, C) and features (N, C) are one image.
        channel_dim: channel axis of a map; None is axis 1, or the last axis of (N, H, W, C) with H = W != C.
        figure: a matplotlib `Figure` or `SubFigure` to draw in, instead of a new one.

    Raises:
        HookdropError: matplotlib is not installed.
        ShapeError: a tensor cannot be shown as images, or the batch has no such sample.
        LayerError: nothing was captured.
    """
    calls: Mapping[str, Any] = {"": [what]} if isinstance(what, Tensor) else what
    shown = {name: of_layer[-1] for name, of_layer in calls.items() if of_layer[-1] is not None}
    if not shown:
        raise LayerError("nothing to plot: nothing was captured.")
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
        TypeError: `what` is neither a schedule nor an injection.
        InjectionError: the schedule has fractions, and `total_steps` is missing.
    """
    steps = count(steps, "steps", "plot_schedule")
    schedule = what.schedule if isinstance(what, Injection) else what
    if not isinstance(schedule, Schedule):
        raise TypeError(f"plot_schedule takes a schedule or an injection, got {type(what).__name__}.")
    multipliers = schedule.simulate(steps + 1, total_steps)
    # Subsample long schedules, but keep the last step.
    at = sorted({*range(0, steps + 1, max(1, steps // MOST_POINTS)), steps})
    figure = get_figure(figure, 5.5, 3.2)
    axes = figure.subplots()
    axes.set_xlabel("optimizer steps", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0)
    axes.set_title(repr(schedule), fontsize=9, wrap=True)
    if isinstance(what, Injection):
        _draw_rates(axes, what, at, multipliers)
    else:
        axes.plot(at, [multipliers[i] for i in at], color=BLUE)
        axes.set_ylabel("multiplier of the target rate", fontsize=9)
    axes.set_ylim(bottom=0)
    return figure  # type: ignore[no-any-return]


def _draw_rates(axes: Axes, injection: Injection, at: list[int], multipliers: list[float]) -> None:
    targets: dict[float, list[str]] = {}
    for hook in injection._sinks:
        if hook.target is not None:
            targets.setdefault(hook.target * hook.p_scale, []).append(hook.site)
    if not targets:
        raise LayerError(f"{injection.name!r} has no rate that a schedule controls.")
    for target, sites in sorted(targets.items(), reverse=True):
        label = sites[0] if len(sites) == 1 else counted(len(sites), "site")
        axes.plot(at, [target * multipliers[i] for i in at], label=f"target rate {target:.3g}: {label}")
    if len(targets) > 1:
        axes.legend(fontsize=8, frameon=False)
    now, place = injection.step_count, axes.get_xaxis_transform()
    if 0 < now <= at[-1]:
        axes.axvline(now, color="gray", linewidth=1, linestyle=":")
        axes.text(
            now, 0.02, f"step {now}", fontsize=8, color="gray", transform=place, va="bottom", ha="right", rotation=90
        )
    axes.set_ylabel("rate" if injection.keep_prob is None else "p")
    if injection.keep_prob is not None:
        axes.spines["right"].set_visible(True)
        complement: Any = lambda p: 1 - p  # noqa: E731
        right = axes.secondary_yaxis("right", functions=(complement, complement))
        right.set_ylabel("keep_prob = 1 - p", fontsize=9)
        right.tick_params(labelsize=8)


def stats_figure(layers: Sequence[LayerStats], figure: Any = None) -> Figure:
    """Draw variances, gradient norms and fractions in three columns, one row for each layer."""
    if not layers:
        raise LayerError("nothing to plot: no layer was called.")
    figure = get_figure(figure, 9.0, 1.2 + min(0.22, 16 / len(layers)) * len(layers))
    first, second, third = figure.subplots(1, 3, sharey=True)
    lines = range(len(layers))
    variances, norms = [layer.variance for layer in layers], [layer.gradient_norm for layer in layers]
    for axes, title, values in ((first, "variance of the output", variances), (second, "norm of the gradient", norms)):
        axes.plot([value if value > 0 else math.nan for value in values], lines, "o-", color=BLUE, markersize=4)
        axes.set_xlabel(title, fontsize=9)
        if known := [value for value in values if 0 < value < math.inf]:  # from one power of ten to another
            low, high = math.floor(math.log10(min(known))), math.ceil(math.log10(max(known)))
            axes.set_xscale("log")
            axes.set_xlim(10.0**low * 0.8, 10.0 ** max(high, low + 1) * 1.25)
            axes.minorticks_off()
    fractions = {
        ("dead channels", "o", ORANGE): [layer.dead for layer in layers],
        ("saturated elements", "s", BLUE): [layer.saturated for layer in layers],
    }
    for (label, marker, color), parts in fractions.items():
        if points := [(part, line) for line, part in enumerate(parts) if part is not None]:
            third.plot(*zip(*points, strict=True), marker, color=color, label=label, markersize=4)
    third.set_xlim(-0.03, 1.03)
    third.set_xlabel("fraction", fontsize=9)
    if third.lines:
        third.legend(fontsize=8, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    first.set_yticks(lines, [f"{layer.name or 'the model'} ({layer.kind})" for layer in layers])
    first.set_ylim(len(layers) - 0.5, -0.5)
    first.tick_params(axis="y", labelsize=min(8.0, 8.0 * 16 / (0.22 * len(layers))))
    for axes in (first, second, third):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#eeeeee")
        axes.tick_params(axis="x", labelsize=8)
    return figure  # type: ignore[no-any-return]

"""Figures of schedules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hookdrop.core.arguments import count
from hookdrop.core.handle import Injection
from hookdrop.core.schedules import Schedule
from hookdrop.core.tables import counted
from hookdrop.measure.figures import get_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE = "#2166ac"


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
    figure = get_figure(figure, 5.5, 3.2)
    axes = figure.subplots()
    axes.set_xlabel("optimizer steps", fontsize=9)
    axes.set_title(repr(schedule), fontsize=9, wrap=True)
    axes.tick_params(labelsize=8)
    if isinstance(what, Injection):
        _draw_rates(axes, what, multipliers)
    else:
        axes.plot(multipliers, color=BLUE)
        axes.set_ylabel("multiplier of the target rate", fontsize=9)
    axes.margins(x=0)
    axes.set_ylim(bottom=0)
    return figure  # type: ignore[no-any-return]


def _draw_rates(axes: Axes, injection: Injection, multipliers: list[float]) -> None:
    targets: dict[float, list[str]] = {}
    for hook in injection._sinks:
        if hook.target is not None:
            targets.setdefault(hook.target * hook.p_scale, []).append(hook.site)
    for target, sites in sorted(targets.items(), reverse=True):
        label = sites[0] if len(sites) == 1 else counted(len(sites), "site")
        axes.plot([target * one for one in multipliers], label=f"target rate {target:.3g}: {label}")
    if len(targets) > 1:
        axes.legend(fontsize=8, frameon=False)
    axes.axvline(injection.step_count, color="gray", linewidth=1, linestyle=":")
    axes.set_ylabel("rate" if injection.keep_prob is None else "p")
    if injection.keep_prob is not None:
        complement: Any = lambda p: 1 - p  # noqa: E731
        right = axes.secondary_yaxis("right", functions=(complement, complement))
        right.set_ylabel("keep_prob = 1 - p", fontsize=9)
        right.tick_params(labelsize=8)

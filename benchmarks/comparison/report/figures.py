"""The page's larger figures: curves over training, the rate's ramp, calibration."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from comparison.analysis.schema import ArmFound, Band, Bin
from comparison.report.looks import Look
from comparison.report.svg import GRID, SETTINGS, TEXT, arm_colour, inline

WIDTH, HEIGHT = 328, 250
"""In pixels: as wide as a phone, so that text keeps its 14 pixels there."""
Drawn = Sequence[tuple[int, Look, Band]]
Binned = Sequence[tuple[int, Look, list[Bin]]]


def curves(arms: Sequence[ArmFound], looks: Sequence[Look], what: str) -> Drawn:
    """The arms that have this curve: index, look and band."""
    found = ((i, look, getattr(arm, what)) for i, (arm, look) in enumerate(zip(arms, looks, strict=True)))
    return [(i, look, band) for i, look, band in found if band.x]


def lines(drawn: Drawn, ident: str, label: str, x: str, marked: bool = True) -> Markup | None:
    """Medians with their quartiles as bands; None if there is nothing to draw."""
    if not drawn:
        return None
    with mpl.rc_context(SETTINGS):
        figure, axes = _figure(HEIGHT)
        for i, look, band in drawn:
            _line(axes, i, look, band.x, band.median, marked=marked)
            fill = axes.fill_between(band.x, band.low, band.high, color=arm_colour(look.colour), alpha=0.14, lw=0)
            fill.set_gid(f"arm{i}-band")
        _scale(axes, [value for _, _, band in drawn for value in (*band.low, *band.high)])
        axes.set_xlabel(x)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10], integer=True))
        return inline(figure, ident, label)


def calibration(binned: Binned, ident: str, label: str) -> Markup | None:
    """A reliability diagram over a plot of the counts; None without bins."""
    if not binned:
        return None
    with mpl.rc_context(SETTINGS):
        figure = Figure(figsize=(WIDTH / 72, 1.5 * HEIGHT / 72), layout="constrained")
        axes, counts = figure.subplots(2, 1, sharex=True, height_ratios=(2.6, 1))
        axes.plot((0, 1), (0, 1), color=TEXT, lw=1)
        for i, look, bins in binned:
            x = [one.confidence for one in bins]
            _line(axes, i, look, x, [one.accuracy for one in bins], every=1)
            _line(counts, i, look, x, [one.count for one in bins], name="count", marked=False)
        axes.set(xlim=(0, 1), ylim=(0, 1.02), ylabel="fraction right")
        counts.set(yscale="log", xlabel="confidence", ylabel="images")
        counts.yaxis.set_major_formatter("{x:g}")
        counts.yaxis.set_minor_formatter(NullFormatter())
        return inline(figure, ident, label)


def _figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH / 72, height / 72), layout="constrained")
    axes = figure.subplots()
    axes.grid(color=GRID, lw=0.8)
    return figure, axes


def _line(
    axes: Axes,
    i: int,
    look: Look,
    x: Sequence[float],
    y: Sequence[float],
    name: str = "line",
    marked: bool = True,
    every: int = 0,
) -> None:
    line = Line2D(x, y, color=arm_colour(look.colour), lw=1.7, markersize=5.5, gid=f"arm{i}-{name}")
    if look.dash:
        line.set_linestyle((0, tuple(length / 1.7 for length in look.dash)))
    if marked:
        # Markers of different arms start at different points: they do not hide one another.
        step = every or max(1, len(x) // 5)
        line.set(marker=look.marker, markevery=(i % step, step))
    axes.add_line(line)
    axes.autoscale_view()


def _scale(axes: Axes, values: Sequence[float]) -> None:
    """Logarithmic where the values span more than a factor of 8."""
    if min(values) > 0 and max(values) > 8 * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5))

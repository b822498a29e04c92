"""Figures of the report as inline SVG: training curves, rates, calibration."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from comparison.analysis.schema import ArmSummary, Band, Bin
from comparison.report.arm_styles import ArmStyle

WIDTH, HEIGHT = 328, 250
"""Size in pixels: a phone's width, so that text keeps its 14 pixels there."""
# Placeholder colors, which are replaced with the page's CSS variables.
TEXT, GRID = "#010101", "#020202"
_VARIABLES = {TEXT: "var(--ink)", GRID: "var(--grid)"}
SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "comparison",
    "font.size": 14,
    "text.color": TEXT,
    "axes.edgecolor": TEXT,
    "axes.labelcolor": TEXT,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "grid.color": GRID,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.useoffset": False,
    "text.parse_math": False,
    "path.simplify": False,
}
Drawn = Sequence[tuple[int, ArmStyle, Band]]
Binned = Sequence[tuple[int, ArmStyle, list[Bin]]]


def curves(arms: Sequence[ArmSummary], styles: Sequence[ArmStyle], what: str) -> Drawn:
    """Index, style and band of the arms that have this curve."""
    found = ((i, style, getattr(arm, what)) for i, (arm, style) in enumerate(zip(arms, styles, strict=True)))
    return [(i, style, band) for i, style, band in found if band.x]


def lines(drawn: Drawn, ident: str, label: str, x: str, marked: bool = True) -> Markup | None:
    """Medians with quartile bands; None if there is nothing to draw."""
    if not drawn:
        return None
    with mpl.rc_context(SETTINGS):
        figure, axes = _figure(HEIGHT)
        for i, style, band in drawn:
            _line(axes, i, style, band.x, band.median, marked=marked)
            fill = axes.fill_between(band.x, band.low, band.high, color=arm_color(style.color), alpha=0.14, lw=0)
            fill.set_gid(f"arm{i}-band")
        _scale(axes, [value for _, _, band in drawn for value in (*band.low, *band.high)])
        axes.set_xlabel(x)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10], integer=True))
        return inline(figure, ident, label)


def calibration(binned: Binned, ident: str, label: str) -> Markup | None:
    """A reliability diagram above a plot of the counts; None without bins."""
    if not binned:
        return None
    with mpl.rc_context(SETTINGS):
        figure = Figure(figsize=(WIDTH / 72, 1.5 * HEIGHT / 72), layout="constrained")
        axes, counts = figure.subplots(2, 1, sharex=True, height_ratios=(2.6, 1))
        axes.plot((0, 1), (0, 1), color=TEXT, lw=1)
        for i, style, bins in binned:
            x = [one.confidence for one in bins]
            _line(axes, i, style, x, [one.accuracy for one in bins], every=1)
            _line(counts, i, style, x, [one.count for one in bins], name="count", marked=False)
        axes.set(xlim=(0, 1), ylim=(0, 1.02), ylabel="accuracy")
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
    style: ArmStyle,
    x: Sequence[float],
    y: Sequence[float],
    name: str = "line",
    marked: bool = True,
    every: int = 0,
) -> None:
    line = Line2D(x, y, color=arm_color(style.color), lw=1.7, markersize=5.5, gid=f"arm{i}-{name}")
    if style.dash:
        line.set_linestyle((0, tuple(length / 1.7 for length in style.dash)))
    if marked:
        # Stagger the markers of different arms so that they do not overlap.
        step = every or max(1, len(x) // 5)
        line.set(marker=style.marker, markevery=(i % step, step))
    axes.add_line(line)
    axes.autoscale_view()


def _scale(axes: Axes, values: Sequence[float]) -> None:
    """Use a log scale if the values span more than a factor of 8."""
    if min(values) > 0 and max(values) > 8 * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5))


def arm_color(color: int) -> str:
    """The placeholder color of `--arm-N`."""
    return f"#0300{color:02x}"


def inline(figure: Figure, ident: str, label: str) -> Markup:
    """The figure as an `<svg>` element; ids start with `ident`, and artists with gid `armN-...` get `data-arm`."""
    file = io.BytesIO()
    with mpl.rc_context(SETTINGS):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = file.getvalue().decode()
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
    body = text[text.index(">", text.index("<svg")) + 1 : text.rindex("</svg>")]
    body = re.sub(r'\bid="(arm(\d+)-[^"]*)"', r'id="\1" data-arm="\2"', body)
    body = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{ident}-", body.replace("xlink:href", "href"))
    body = re.sub(r"#0300([0-9a-f]{2})", lambda found: f"var(--arm-{int(found[1], 16)})", body)
    for color, variable in _VARIABLES.items():
        body = body.replace(color, variable)
    body = re.sub(r"font: ([\d.]+)px [^;\"]+", r"font-size: \1px", body)
    width, height = (figure.get_size_inches() * 72).round(2)
    head = Markup('<svg role="img" aria-label="{}" viewBox="0 0 {:g} {:g}">').format(label, width, height)
    return head + Markup(body) + Markup("</svg>")

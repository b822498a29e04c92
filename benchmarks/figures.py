"""The figures of speed.py."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

import peers

# The color-blind safe palette of Okabe and Ito; hatches and markers repeat the distinction.
HOOKDROP, NO_KERNEL, OTHER, LIMIT = "#D55E00", "#F0B48C", "#56B4E9", "#000000"
LINES = {
    peers.LIMIT: (LIMIT, "o"),
    peers.BATCH: (HOOKDROP, "D"),
    peers.TORCHVISION: ("#0072B2", "s"),
    peers.TIMM: ("#009E73", "^"),
    peers.TORCH_DROPOUT: ("#E69F00", "v"),
}
KINDS = {"hookdrop": (HOOKDROP, ""), "hookdrop without its compiled kernel": (NO_KERNEL, "///"), "others": (OTHER, "")}


def draw_ratios(path: Path, found: Mapping[str, Any]) -> None:
    """Draw a panel per shape with a bar from the limit to the time of each implementation."""
    figure = Figure(figsize=(5.2 * len(found) + 1.5, 6.4), layout="constrained")
    panels = figure.subplots(1, len(found), sharey=True, sharex=True, squeeze=False)[0]
    for axes, (shape, numbers) in zip(panels, found.items(), strict=True):
        _draw_bars(axes, numbers["contestants"])
        _label(axes, shape, f"time / ({peers.LIMIT}), forward + backward")
    handles = [panels[0].barh(0, 0, color=color, hatch=hatch, edgecolor="white") for color, hatch in KINDS.values()]
    figure.legend(handles, list(KINDS), loc="outside upper center", ncols=len(KINDS), frameon=False, fontsize=11)
    figure.supxlabel("median and quartiles of ratios within a round; shorter is faster; log scale", fontsize=10)
    figure.savefig(path, dpi=110)


def draw_growth(path: Path, found: Mapping[int, Mapping[str, Any]]) -> None:
    """Draw time over elements, both on log scales."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    for name, (color, marker) in LINES.items():
        points = {size: times[name]["milliseconds"] for size, times in found.items() if name in times}
        low, median, high = ([one[end] for one in points.values()] for end in ("low", "median", "high"))
        axes.plot(list(points), median, color=color, marker=marker, label=name)
        axes.fill_between(list(points), low, high, color=color, alpha=0.15, linewidth=0)
    axes.set(xscale="log", yscale="log", ylabel="milliseconds, forward + backward")
    _label(axes, "Time by tensor size: median and quartiles over the rounds", "elements")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=110)


def _draw_bars(axes: Axes, implementations: Mapping[str, Any]) -> None:
    limits = {name: numbers["over_limit"] for name, numbers in implementations.items() if name != peers.LIMIT}
    shown = pd.DataFrame(limits).T
    own = {
        name: "hookdrop without its compiled kernel" if name.endswith(peers.NO_KERNEL) else "hookdrop"
        for name in limits
    }
    colors, hatches = zip(
        *(KINDS[own[name] if name.startswith("hookdrop") else "others"] for name in limits), strict=True
    )
    error = [shown["median"] - shown["low"], shown["high"] - shown["median"]]
    style = {"edgecolor": "white", "error_kw": {"ecolor": "#333333", "capsize": 3, "elinewidth": 1}}
    bars = axes.barh(list(limits), shown["median"] - 1, left=1, xerr=error, color=colors, hatch=hatches, **style)
    axes.bar_label(bars, [f"{median:.3g}" for median in shown["median"]], padding=6)
    axes.axvline(1, color=LIMIT, linewidth=1.5)
    axes.set(xscale="log", ylim=(len(shown) - 0.5, -0.5))
    axes.margins(x=0.12)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")


def _label(axes: Axes, title: str, x: str) -> None:
    axes.set_title(title, fontsize=12, loc="left")
    axes.set_xlabel(x)
    axes.grid(alpha=0.25, axis="both" if axes.get_yscale() == "log" else "x")
    axes.spines[["top", "right"]].set_visible(False)

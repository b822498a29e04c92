"""The picture: how the runs went, and what differs between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from arms import NONE
from report import Interval, Pair, Runs

# Okabe and Ito's colours, which the colour-blind can tell apart; markers and dashes say it again.
STYLES = {
    "none": ("#000000", "o", "-"),
    "Dropout": ("#E69F00", "s", (0, (6, 1))),
    "Dropout2d": ("#56B4E9", "^", (0, (4, 1, 1, 1))),
    "DropBlock": ("#D55E00", "D", (0, (1, 1))),
    "DropPath": ("#009E73", "v", (0, (3, 2))),
}


def draw(path: Path, runs: Runs, intervals: Mapping[str, Mapping[Pair, Interval]], steps_per_epoch: int) -> None:
    """Write the picture to `path`."""
    figure = Figure(figsize=(14, 8), layout="constrained")
    axes = figure.subplots(2, 3)
    for name, of_arm in runs.items():
        epochs = [point[0] for point in of_arm[0]["curve"]]
        losses = [outcome["train_loss"] for outcome in of_arm]
        _line(axes[0, 0], name, range(1, 1 + len(losses[0])), losses, marked=False)
        _line(axes[0, 1], name, epochs, [[point[1] for point in outcome["curve"]] for outcome in of_arm])
        _line(axes[0, 2], name, epochs, [[point[2] for point in outcome["curve"]] for outcome in of_arm])
        _rate(axes[1, 0], name, of_arm[0]["rates"], steps_per_epoch)
    _logarithmic(axes[0, 0], ticks=(1,))
    _logarithmic(axes[0, 2], ticks=(1, 2, 5))
    _label(axes[0, 0], "training loss, with what was dropped", "epoch")
    _label(axes[0, 1], "test accuracy, %", "epoch")
    _label(axes[0, 2], "test NLL", "epoch")
    _label(axes[1, 0], "rate p in force (one line for all four)", "optimizer steps")
    _forest(axes[1, 1], intervals["accuracy"], "test accuracy - none", "percentage points, paired; more is better")
    _forest(axes[1, 2], intervals["nll"], "test NLL - none", "nats, paired; less is better")
    handles, labels = axes[0, 1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False, fontsize=12)
    figure.supxlabel(
        f"{len(losses)} seeds. Upper row: median and middle half. Differences: mean and 95 % interval.", fontsize=10
    )
    figure.savefig(path, dpi=120)


def _line(axes: Axes, name: str, x: Sequence[int], per_run: Any, marked: bool = True) -> None:
    color, marker, dashes = STYLES[name]
    low, median, high = np.quantile(np.array(per_run), (0.25, 0.5, 0.75), axis=0)
    axes.plot(x, median, color=color, linestyle=dashes, marker=marker if marked else None, markersize=5, label=name)
    axes.fill_between(x, low, high, color=color, alpha=0.12, linewidth=0)


def _rate(axes: Axes, name: str, rates: Sequence[float], steps_per_epoch: int) -> None:
    color, _, dashes = STYLES[name]
    axes.plot(np.arange(len(rates)) * steps_per_epoch, rates, color=color, linestyle=dashes, linewidth=2)


def _forest(axes: Axes, intervals: Mapping[Pair, Interval], title: str, unit: str) -> None:
    """The arms' differences to none, one above the other."""
    shown = [(arm, interval) for (arm, other), interval in intervals.items() if other == NONE.name]
    for row, (arm, interval) in enumerate(shown):
        color, marker, _ = STYLES[arm]
        half = [[interval.mean - interval.low], [interval.high - interval.mean]]
        axes.errorbar(interval.mean, row, xerr=half, color=color, marker=marker, markersize=8, capsize=5, linewidth=2)
    axes.axvline(0, color="#000000", linewidth=1)
    axes.set_yticks(range(len(shown)), [arm for arm, _ in shown])
    axes.set_ylim(len(shown) - 0.5, -0.5)
    _label(axes, title, unit)


def _logarithmic(axes: Axes, ticks: Sequence[float]) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=ticks))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")


def _label(axes: Axes, title: str, x: str) -> None:
    axes.set_title(title, fontsize=12, loc="left")
    axes.set_xlabel(x)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)

"""The page of the demo: one sentence, one picture, and what was run."""

from __future__ import annotations

import io
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, ScalarFormatter

TEXT, GRID = "#010101", "#020202"  # replaced by the colors of the page, which follow the reader's light or dark scheme
COLORS = ("#8a8f98", "#2f81d6")  # without and with hooks, readable on white and on black


def write(out: Path, shown: Mapping[str, str], runs: Mapping[str, Sequence[Any]], verdict: Any, every: int) -> Path:
    """Write `index.html`, a page without scripts that needs no other file, and return its path."""
    out.mkdir(parents=True, exist_ok=True)
    loader = FileSystemLoader(Path(__file__).parent)
    template = Environment(loader=loader, autoescape=True, undefined=StrictUndefined).get_template("demo.html.j2")
    page = out / "index.html"
    text = template.render(shown=shown, verdict=verdict, pairs=pairs(runs), curves=curves(runs, every))
    page.write_text(text, encoding="utf-8")
    return page


def curves(runs: Mapping[str, Sequence[Any]], every: int) -> Markup:
    """The perplexity by epoch: of each training thin, the mean thick, on the training text dashed."""
    figure, axes = _axes()
    for color, (side, found) in zip(COLORS, runs.items(), strict=True):
        epochs = [every * (i + 1) for i in range(len(found[0].validation))]
        for run in found:
            axes.plot(epochs, run.validation, color=color, lw=0.7, alpha=0.7)
        axes.plot(epochs, _mean(run.validation for run in found), color=color, lw=3, label=f"{side}: unseen text")
        axes.plot(epochs, _mean(run.training for run in found), color=color, lw=2, ls="--", label=f"{side}: training")
    axes.set(xlabel="epoch", yscale="log", title="Perplexity during training, lower is better")
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(ScalarFormatter())
    axes.yaxis.set_minor_locator(mpl.ticker.LogLocator(subs=(2, 3, 5)))
    axes.legend(loc="upper right", fontsize=11)
    return _svg(figure, "Perplexity by epoch on training and unseen text, with and without hooks")


def pairs(runs: Mapping[str, Sequence[Any]]) -> Markup:
    """Two dots for each pair, joined by a line: the perplexity on the test text."""
    figure, axes = _axes()
    before, after = ([run.test for run in found] for found in runs.values())
    axes.plot([0, 1], [before, after], color=GRID, lw=2, zorder=1)
    for x, values in enumerate((before, after)):
        axes.scatter([x] * len(values), values, color=COLORS[x], s=70, zorder=2)
    axes.set(
        xticks=[0, 1], xticklabels=[*runs], xlim=(-0.4, 1.4), title="Perplexity on unseen text, a line for each pair"
    )
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6))
    return _svg(figure, "Perplexity of each pair on unseen text, without and with hooks")


def _mean(lists: Any) -> list[float]:
    return [statistics.geometric_mean(values) for values in zip(*lists, strict=True)]


def _axes() -> tuple[Figure, Any]:
    names = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    mpl.rcParams.update(dict.fromkeys(names, TEXT) | {"svg.fonttype": "none", "svg.hashsalt": "demo"})
    mpl.rcParams.update({"font.size": 13, "axes.titlesize": 13, "legend.frameon": False, "svg.id": None})
    figure = Figure(figsize=(6.2, 4.4), layout="constrained")
    axes = figure.subplots()
    axes.grid(color=GRID, alpha=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _svg(figure: Figure, label: str) -> Markup:
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    text = text[text.index("<svg") :].replace(TEXT, "currentColor").replace(GRID, "var(--grid)")
    return Markup(text.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1))

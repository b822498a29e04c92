"""Figures of the report as inline SVG, drawn by matplotlib in the colors of the page's style sheet."""

from __future__ import annotations

import io
import re
import textwrap
from typing import Any

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from comparison.analysis.schema import BETTER, TITLES, Difference, Metric

WIDTH, ROW = 340, 48
"""In pixels; the width fits a phone, where text keeps its 14 pixels."""
# Colors are replaced with variables of style.css, which differ between the light and the dark scheme.
TEXT, GRID, MUTED, GOOD, BAD = "#010101", "#020202", "#040404", "#050505", "#060606"
_VARIABLES = {TEXT: "ink", GRID: "grid", MUTED: "muted", GOOD: "good", BAD: "bad"}
SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "comparison",
    "font.size": 14,
    "grid.color": GRID,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), TEXT),
    **dict.fromkeys(("axes.grid", "axes.axisbelow"), True),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "axes.formatter.useoffset"), False),
    **dict.fromkeys(("text.parse_math", "path.simplify", "legend.frameon"), False),
}


def differences(found: dict[str, Difference], metric: Metric, ident: str, none: str) -> Markup:
    """Differences from none: a dot for each seed, the mean with the intervals over seeds, and over images too."""
    with mpl.rc_context(SETTINGS):
        figure = Figure(figsize=(WIDTH / 72, (ROW * len(found) + 80) / 72), layout="constrained")
        axes = figure.subplots()
        axes.axvline(0, color=TEXT, lw=1)
        for y, (name, one) in enumerate(found.items()):
            color = MUTED if not one.clear else GOOD if one.better(metric) else BAD
            dots = [y + 0.05 + 0.07 * (i % 3) for i in range(len(one.values))]
            axes.plot(one.values, dots, ".", color=color, alpha=0.6)
            axes.plot([one.low_images, one.high_images], [y + 0.34] * 2, color=color, lw=1)
            axes.plot([one.low, one.high], [y + 0.34] * 2, color=color, lw=3.5)
            # A filled marker: distinguished from none, so that the color is not the only sign.
            axes.plot(one.mean, y + 0.34, "D", color=color, mfc=color if one.clear else "none", ms=7)
            axes.text(0, y - 0.18, _short(name), transform=axes.get_yaxis_transform(), fontsize=13)
        axes.set(ylim=(len(found) - 0.4, -0.6), yticks=[])
        axes.spines["left"].set_visible(False)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
        side = "right" if BETTER[metric] > 0 else "left"
        axes.set_xlabel(f"{TITLES[metric]}: arm − {none} ({side} is better)", fontsize=13)
        return inline(figure, ident, f"{TITLES[metric]}: difference of each arm from {none}; the table has the numbers")


def _short(name: str) -> str:
    return textwrap.shorten(name, 40, placeholder=" …") if len(name.split()) > 1 else name[:40]


def inline(figure: Figure, ident: str, label: str) -> Markup:
    """The figure as an `<svg>` element whose ids start with `ident`."""
    file = io.BytesIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", file.getvalue().decode(), flags=re.DOTALL)
    body = text[text.index(">", text.index("<svg")) + 1 : text.rindex("</svg>")]
    body = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{ident}-", body.replace("xlink:href", "href"))
    for color, variable in _VARIABLES.items():
        body = body.replace(color, f"var(--{variable})")
    body = re.sub(r"font: ([\d.]+)px [^;\"]+", r"font-size: \1px", body)
    body = re.sub(r"\n\s*", "\n", body)
    width, height = (figure.get_size_inches() * 72).round(2)
    head = Markup('<svg role="img" aria-label="{}" viewBox="0 0 {:g} {:g}">').format(label, width, height)
    return head + Markup(body) + Markup("</svg>")

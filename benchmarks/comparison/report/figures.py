"""Figures of the report as inline SVG, drawn by matplotlib in the colors of the page's style sheet."""

import io
import re
import textwrap
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from comparison.analysis.schema import BETTER, NO_CALL, TITLES, Difference, Metric

# Colors are replaced with variables of style.css, which differ between the light and the dark scheme.
TEXT, GRID, PAPER, MUTED, GOOD, BAD = "#010101", "#020202", "#030303", "#040404", "#050505", "#060606"
_VARIABLES = {TEXT: "ink", GRID: "grid", PAPER: "paper", MUTED: "muted", GOOD: "good", BAD: "bad"}
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
Found = Mapping[str, Mapping[Metric, Difference]]


def differences(found: Found, ident: str, none: str, controls: Collection[str] = ()) -> Markup:
    """Differences from none, twice: panels side by side for a wide window, and one below the other for a phone."""
    shown = {name: of for name, of in found.items() if any(one.mean for one in of.values()) or name not in controls}
    metrics = list(next(iter(found.values())))
    with mpl.rc_context({**SETTINGS, "axes.grid.axis": "x", "axes.spines.left": False, "ytick.major.size": 0}):
        wide = _figure(shown, metrics, f"{ident}-wide", none, controls)
        narrow = [_figure(shown, [metric], f"{ident}-{metric}", none, controls, True) for metric in metrics]
    return Markup('<div class="wide">{}</div>\n<div class="narrow">{}</div>').format(wide, Markup("\n").join(narrow))


def _figure(
    found: Found, metrics: Sequence[Metric], ident: str, none: str, controls: Collection[str], narrow: bool = False
) -> Markup:
    """A panel for each metric. Names are at the left, or on a phone above each arm, where no line crosses them."""
    width, row = (340, 48) if narrow else (1168, 34)
    figure = Figure(figsize=(width / 72, (row * len(found) + 80) / 72), layout="constrained")
    panels = figure.subplots(1, len(metrics), sharey=True, squeeze=False)[0]
    for axes, metric in zip(panels, metrics, strict=True):
        _panel(axes, {name: of[metric] for name, of in found.items()}, metric, controls)
        axes.set_ylim(len(found) - 0.4, -0.6)
        side = "right" if BETTER[metric] > 0 else "left"
        axes.set_xlabel(f"{TITLES[metric]}: variant − {none} ({side} is better)", fontsize=13)
    for y, name in enumerate(found if narrow else ()):
        panels[0].axhspan(y - 0.6, y - 0.04, color=PAPER, lw=0, zorder=1.5)
        panels[0].text(0, y - 0.18, _short(name), transform=panels[0].get_yaxis_transform(), fontsize=13)
    names = [] if narrow else [textwrap.fill(_short(name), 28) for name in found]
    panels[0].set_yticks([y + 0.2 for y, _ in enumerate(names)], names)
    titles = "; ".join(TITLES[metric] for metric in metrics)
    return inline(figure, ident, f"{titles}: difference of each variant from {none}; the table has the numbers")


def _panel(axes: Axes, found: Mapping[str, Difference], metric: Metric, controls: Collection[str]) -> None:
    """A dot for each seed, the mean, and the intervals over seeds, and over images too, where there is any spread."""
    axes.axvline(0, color=TEXT, lw=1, zorder=1)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
    for y, (name, one) in enumerate(found.items()):
        call = NO_CALL if name in controls else one.called(metric)
        color = {"better": GOOD, "worse": BAD, NO_CALL: MUTED}[call]
        axes.plot(one.values, [y + 0.05 + 0.07 * (i % 3) for i in range(len(one.values))], ".", color=color, alpha=0.6)
        for low, high, size in ((one.low_images, one.high_images, 1), (one.low, one.high, 3.5)):
            if low < high:
                axes.plot([low, high], [y + 0.34] * 2, color=color, lw=size)
        # A filled marker: called better or worse, so that the color is not the only sign.
        axes.plot(one.mean, y + 0.34, "D", color=color, mfc="none" if call == NO_CALL else color, ms=7)


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

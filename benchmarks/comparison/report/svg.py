"""Matplotlib's figures as SVG inside of the page."""

from __future__ import annotations

import io
import re
from typing import Any

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.figure import Figure

# Colours that nothing else has: the page's CSS variables take their place.
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


def arm_colour(colour: int) -> str:
    """The stand-in for `--arm-N`."""
    return f"#0300{colour:02x}"


def inline(figure: Figure, ident: str, label: str) -> Markup:
    """The figure as an `<svg>` element; ids begin with `ident`, and artists with the gid `armN-...` get `data-arm`."""
    file = io.BytesIO()
    with mpl.rc_context(SETTINGS):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = file.getvalue().decode()
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
    body = text[text.index(">", text.index("<svg")) + 1 : text.rindex("</svg>")]
    body = re.sub(r'\bid="(arm(\d+)-[^"]*)"', r'id="\1" data-arm="\2"', body)
    body = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{ident}-", body.replace("xlink:href", "href"))
    body = re.sub(r"#0300([0-9a-f]{2})", lambda found: f"var(--arm-{int(found[1], 16)})", body)
    for colour, variable in _VARIABLES.items():
        body = body.replace(colour, variable)
    body = re.sub(r"font: ([\d.]+)px [^;\"]+", r"font-size: \1px", body)
    width, height = (figure.get_size_inches() * 72).round(2)
    head = Markup('<svg role="img" aria-label="{}" viewBox="0 0 {:g} {:g}">').format(label, width, height)
    return head + Markup(body) + Markup("</svg>")

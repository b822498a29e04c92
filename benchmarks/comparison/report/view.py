"""View models for the template: a cell with the order, styles and axes of its arms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from comparison.analysis.inference import more_than_chance
from comparison.analysis.schema import BETTER, METRICS, ArmSummary, Cell, Difference, Environment, Metric, Summary
from comparison.analysis.summary_text import join
from comparison.report import figures
from comparison.report.arm_styles import ArmStyle, arm_styles
from comparison.report.numbers import count
from comparison.report.strips import Axis, axis_of

CURVES = (
    ("train_loss", "Training loss", "with regularization active; a higher loss does not mean a worse model"),
    ("validation_accuracy", "Validation accuracy, %", "higher is better"),
    ("validation_nll", "Validation NLL, nats", "lower is better"),
)
KINDS = ("none", "regularizer", "recipe", "peer", "reference", "control")
Differences = dict[Metric, Difference | None]


@dataclass(frozen=True)
class Row:
    """An arm with its index and style."""

    index: int
    arm: ArmSummary
    style: ArmStyle

    @property
    def differences(self) -> Differences:
        """Differences from none; None for a metric without a complete pair."""
        return {metric: (self.arm.against_none or {}).get(metric) for metric in METRICS}

    def key(self, metric: Metric) -> float | None:
        """The sort key of the row; 0 for none itself."""
        found = self.differences[metric]
        return found.mean if found else 0.0 if self.arm.kind == "none" else None


@dataclass(frozen=True)
class Pair:
    """The difference `a - b` between two regularizers."""

    a: str
    b: str
    differences: Differences


@dataclass(frozen=True)
class Plot:
    """A figure with its title and note."""

    name: str
    title: str
    note: str
    picture: Markup | None


@dataclass(frozen=True)
class Control:
    """A control with its result (None: not measured) and the numbers behind it."""

    question: str
    yes: bool | None
    numbers: str


class CellView:
    """A cell for the template; its ids start with `id`."""

    def __init__(self, index: int, cell: Cell) -> None:
        self.cell, self.index, self.id = cell, index, f"cell{index + 1}"
        styles = arm_styles(cell.arms)
        self.rows = [Row(i, arm, style) for i, (arm, style) in enumerate(zip(cell.arms, styles, strict=True))]
        ranked = sorted(self.rows, key=_rank)
        self.findings, self.notes = (
            cell.words[: cell.findings],
            [] if cell.findings is None else cell.words[cell.findings :],
        )
        self.ranked = [row for row in ranked if row.arm.kind not in ("control", "reference")]
        self.references = [row for row in ranked if row.arm.kind == "reference"]
        self.controls = [row for row in ranked if row.arm.kind == "control"]
        self.kinds = [kind for kind in KINDS if any(arm.kind == kind for arm in cell.arms)]
        self.pairs = _pairs(cell)
        self.axes = {metric: axis_of(row.differences[metric] for row in self.rows) for metric in METRICS}
        self.pair_axes = {metric: axis_of(pair.differences[metric] for pair in self.pairs) for metric in METRICS}
        self.plots = [self._plot(*curve) for curve in CURVES]
        label = f"{cell.title}: rate over optimizer steps, one line per arm; the table below has the numbers"
        drawn = figures.curves(cell.arms, styles, "rate")
        self.ramp = figures.lines(drawn, f"{self.id}-rate", label, "optimizer step", marked=False)
        label = f"{cell.title}: accuracy over confidence, and the images per bin; the table has the numbers"
        binned = [(row.index, row.style, row.arm.calibration) for row in self.rows if row.arm.calibration]
        self.calibration = figures.calibration(binned, f"{self.id}-calibration", label)
        self.checks = _checks(cell)
        rates = [(site.asked, site.dropped) for arm in cell.arms for site in arm.realised]
        rates += [(arm.asked or 0.0, arm.dropped or 0.0) for arm in cell.arms]
        self.rate_axis = Axis.of(rate for pair in rates for rate in pair)
        self.cost_axis = Axis.of(
            (value for arm in cell.arms for cost in (arm.time, arm.memory) if cost for value in (cost.low, cost.high)),
            through=1.0,
        )

    def having(self, what: str) -> list[Row]:
        """The rows of arms that have this value."""
        if what == "rate":
            return [row for row in self.rows if row.arm.rate.x]
        return [row for row in self.rows if getattr(row.arm, what)]

    def _plot(self, name: str, title: str, note: str) -> Plot:
        styles = [row.style for row in self.rows]
        label = f"{self.cell.title}: {title} over epochs, one line per arm; the table below has the last values"
        drawn = figures.curves(self.cell.arms, styles, name)
        return Plot(name, title, note, figures.lines(drawn, f"{self.id}-{name}", label, "epoch"))


def sentence(summary: Summary) -> str:
    """A sentence that describes the comparison."""
    kinds: dict[str, str] = {arm.name: arm.kind for cell in summary.cells for arm in cell.arms}
    nouns = {"regularizer": "regularizer", "recipe": "recipe", "peer": "implementation from other libraries"}
    plural = {"peer": "implementations from other libraries"}
    numbers = {kind: list(kinds.values()).count(kind) for kind in nouns}
    parts = [count(numbers[kind], noun, plural.get(kind, "")) for kind, noun in nouns.items() if numbers[kind]]
    compared = join(parts) or "No regularizer"
    where = "; ".join(cell.title for cell in summary.cells) or "no cell has a finished run"
    seeds = count(summary.seeds, "seed")
    fixed = "changed after the first run" if summary.amendments else "fixed in advance"
    return f"{compared}, compared with none in paired training runs with {seeds} each, {fixed}: {where}."


def environments(found: Sequence[Environment]) -> list[tuple[int, list[tuple[str, str, bool]]]]:
    """Runs of each environment, and its details as (name, value, differs between environments)."""
    flat = [_flat(environment.details) for environment in found]
    same = {name for name in flat[0] if all(one.get(name) == flat[0][name] for one in flat)} if flat else set()
    return [
        (environment.runs, [(name, value, name not in same) for name, value in details.items()])
        for environment, details in zip(found, flat, strict=True)
    ]


def _flat(details: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in details.items():
        if isinstance(value, dict):
            found |= {f"{name}.{inner}": str(one) for inner, one in value.items()}
        else:
            found[name] = str(value)
    return found


def _rank(row: Row) -> tuple[bool, float]:
    key = row.key(METRICS[0])
    known = key is not None and math.isfinite(key)
    return not known, -BETTER[METRICS[0]] * key if known and key is not None else 0.0


def _pairs(cell: Cell) -> list[Pair]:
    found: dict[tuple[str, str], Differences] = {}
    for between in cell.between:
        found.setdefault((between.a, between.b), dict.fromkeys(METRICS))[between.metric] = between.difference
    return [Pair(a, b, differences) for (a, b), differences in found.items()]


def _checks(cell: Cell) -> list[Control]:
    controls = cell.controls
    aa = controls.aa_equal == controls.aa_seeds if controls.aa_seeds else None
    covered = [name for name, found in (controls.none_none or {}).items() if found.low <= 0 <= found.high]
    same = None if controls.none_none is None else not more_than_chance(controls.none_none)
    hooked = controls.unchanged == controls.hooked if controls.hooked else None
    of = f"{len(covered)} of {count(len(controls.none_none or {}), 'metric')}"
    return [
        Control(
            "Is the arm with p = 0 injected (A/A) bit-identical to none, in weights and outputs?",
            aa,
            f"{controls.aa_equal} of {count(controls.aa_seeds, 'seed')}" if controls.aa_seeds else "",
        ),
        Control(
            "Is the difference between none with other seeds and none consistent with chance?",
            same,
            f"the interval covers 0 in {of}" if controls.none_none else "",
        ),
        Control("Did all arms of a seed have the same initial weights and batches?", controls.paired, ""),
        Control(
            "Were state_dict, repr and eval output bit-identical with hooks and after remove()?",
            hooked,
            f"{controls.unchanged} of {count(controls.hooked, 'run')}" if controls.hooked else "",
        ),
    ]

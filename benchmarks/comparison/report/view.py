"""What the template shows of a cell: the summary with its order, looks and axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from comparison.analysis.inference import more_than_chance
from comparison.analysis.schema import BETTER, METRICS, ArmFound, Cell, Difference, Environment, Metric, Summary
from comparison.report import figures
from comparison.report.looks import Look, looks_of
from comparison.report.numbers import count
from comparison.report.strips import Axis, axis_of

CURVES = (
    ("train_loss", "Training loss", "with what was dropped; a regularized loss may be higher and the model no worse"),
    ("validation_accuracy", "Validation accuracy, %", "more is better"),
    ("validation_nll", "Validation NLL, nats", "less is better"),
)
KINDS = ("none", "regularizer", "recipe", "peer", "control")
Differences = dict[Metric, Difference | None]


@dataclass(frozen=True)
class Row:
    """An arm, its place in the cell and its look."""

    index: int
    arm: ArmFound
    look: Look

    @property
    def differences(self) -> Differences:
        """Against none; None for a metric without a complete pair."""
        return {metric: (self.arm.against_none or {}).get(metric) for metric in METRICS}

    def key(self, metric: Metric) -> float | None:
        """What the row is ranked by: none differs from itself by 0."""
        found = self.differences[metric]
        return found.mean if found else 0.0 if self.arm.kind == "none" else None


@dataclass(frozen=True)
class Pair:
    """Two arms that are not none, `a - b`."""

    a: str
    b: str
    differences: Differences


@dataclass(frozen=True)
class Plot:
    """A figure with its words."""

    name: str
    title: str
    note: str
    picture: Markup | None


@dataclass(frozen=True)
class Answer:
    """A control: what is asked, whether it came out (None: not measured), and the numbers."""

    question: str
    yes: bool | None
    numbers: str


class CellView:
    """A cell for the template; ids begin with `id`."""

    def __init__(self, index: int, cell: Cell) -> None:
        self.cell, self.index, self.id = cell, index, f"cell{index + 1}"
        looks = looks_of(cell.arms)
        self.rows = [Row(i, arm, look) for i, (arm, look) in enumerate(zip(cell.arms, looks, strict=True))]
        ranked = sorted(self.rows, key=_rank)
        self.findings, self.notes = (
            cell.words[: cell.findings],
            [] if cell.findings is None else cell.words[cell.findings :],
        )
        self.ranked = [row for row in ranked if row.arm.kind != "control"]
        self.controls = [row for row in ranked if row.arm.kind == "control"]
        self.kinds = [kind for kind in KINDS if any(arm.kind == kind for arm in cell.arms)]
        self.pairs = _pairs(cell)
        self.axes = {metric: axis_of(row.differences[metric] for row in self.rows) for metric in METRICS}
        self.pair_axes = {metric: axis_of(pair.differences[metric] for pair in self.pairs) for metric in METRICS}
        self.plots = [self._plot(*curve) for curve in CURVES]
        label = f"{cell.title}: rate in force over optimizer steps, a line an arm; the table below has the numbers"
        drawn = figures.curves(cell.arms, looks, "rate")
        self.ramp = figures.lines(drawn, f"{self.id}-rate", label, "optimizer step", marked=False)
        label = f"{cell.title}: fraction right over confidence, and the images of each bin; the table has the numbers"
        binned = [(row.index, row.look, row.arm.calibration) for row in self.rows if row.arm.calibration]
        self.calibration = figures.calibration(binned, f"{self.id}-calibration", label)
        self.answers = _answers(cell)
        rates = [(site.asked, site.dropped) for arm in cell.arms for site in arm.realised]
        rates += [(arm.asked or 0.0, arm.dropped or 0.0) for arm in cell.arms]
        self.rate_axis = Axis.of(rate for pair in rates for rate in pair)
        self.cost_axis = Axis.of(
            (value for arm in cell.arms for cost in (arm.time, arm.memory) if cost for value in (cost.low, cost.high)),
            through=1.0,
        )

    def having(self, what: str) -> list[Row]:
        """The rows of arms that have this."""
        if what == "rate":
            return [row for row in self.rows if row.arm.rate.x]
        return [row for row in self.rows if getattr(row.arm, what)]

    def _plot(self, name: str, title: str, note: str) -> Plot:
        looks = [row.look for row in self.rows]
        label = f"{self.cell.title}: {title} over epochs, a line an arm; the table below has its last values"
        drawn = figures.curves(self.cell.arms, looks, name)
        return Plot(name, title, note, figures.lines(drawn, f"{self.id}-{name}", label, "epoch"))


def sentence(summary: Summary) -> str:
    """What was compared."""
    kinds: dict[str, str] = {arm.name: arm.kind for cell in summary.cells for arm in cell.arms}
    words = {"regularizer": "regularizer", "recipe": "recipe", "peer": "implementation of other libraries"}
    plural = {"peer": "implementations of other libraries"}
    numbers = {kind: list(kinds.values()).count(kind) for kind in words}
    parts = [count(numbers[kind], word, plural.get(kind, "")) for kind, word in words.items() if numbers[kind]]
    compared = " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]])) or "No regularizer"
    where = "; ".join(cell.title for cell in summary.cells) or "no cell has a finished run"
    seeds = count(summary.seeds, "seed")
    fixed = "changed after the first run" if summary.amendments else "fixed beforehand"
    return f"{compared}, compared with none in paired training runs of {seeds} each, {fixed}: {where}."


def environments(found: Sequence[Environment]) -> list[tuple[int, list[tuple[str, str, bool]]]]:
    """For each environment its runs, and its details as name, value and whether they differ between environments."""
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


def _answers(cell: Cell) -> list[Answer]:
    controls = cell.controls
    aa = controls.aa_equal == controls.aa_seeds if controls.aa_seeds else None
    covered = [name for name, found in (controls.none_none or {}).items() if found.low <= 0 <= found.high]
    same = None if controls.none_none is None else not more_than_chance(controls.none_none)
    hooked = controls.unchanged == controls.hooked if controls.hooked else None
    of = f"{len(covered)} of {count(len(controls.none_none or {}), 'metric')}"
    return [
        Answer(
            "Does the arm with p = 0 injected (A/A) end bit-equal to none, weights and outputs?",
            aa,
            f"{controls.aa_equal} of {count(controls.aa_seeds, 'seed')}" if controls.aa_seeds else "",
        ),
        Answer(
            "Does none with other seeds differ from none no more than chance explains?",
            same,
            f"the interval covers 0 in {of}" if controls.none_none else "",
        ),
        Answer("Did all arms of a seed see the same batches from the same weights?", controls.paired, ""),
        Answer(
            "Were state_dict, repr and eval output bit-equal with hooks and after remove()?",
            hooked,
            f"{controls.unchanged} of {count(controls.hooked, 'run')}" if controls.hooked else "",
        ),
    ]

"""The report of a comparison: one self-contained HTML page without scripts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from comparison.analysis import text
from comparison.analysis.schema import DECIMALS, METRICS, SHORT, UNCLEAR, ArmSummary, Cell, Difference, Metric, Summary
from comparison.report import figures
from comparison.report.table import rows

HERE = Path(__file__).parent
ABSENT = "–"
CURVES = {
    "train_loss": ("Training loss", "epoch"),
    "validation_accuracy": ("Validation accuracy, %", "epoch"),
    "validation_nll": ("Validation NLL, nats", "epoch"),
    "rate": ("Rate", "optimizer step"),
}


def write(summary: Summary, path: Path) -> None:
    """Write the report to `path`. It is deterministic: equal summaries give identical files."""
    path.write_text(render(summary), encoding="utf-8", newline="\n")


def render(summary: Summary) -> str:
    """Render the report as HTML."""
    settings = {"autoescape": True, "undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    environment = Environment(loader=FileSystemLoader(HERE), **settings)  # type: ignore[arg-type]
    environment.filters["count"] = lambda number, word: text.plural(number, word)
    cells = [CellView(i, cell) for i, cell in enumerate(summary.cells)]
    style = Markup((HERE / "style.css").read_text(encoding="utf-8"))
    page = environment.get_template("page.html.j2")
    created = datetime.fromisoformat(summary.created).astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return page.render(summary=summary, cells=cells, about=_about(summary), style=style, created=created)


@dataclass(frozen=True)
class Section:
    """A part that opens: sentences, figures and a table; `Not measured.` if it is empty."""

    title: str
    note: str = ""
    sentences: Sequence[str] = ()
    pictures: Sequence[Markup | None] = ()
    table: pd.DataFrame = field(default_factory=pd.DataFrame)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to show."""
        return self.table.empty and not self.sentences and not any(self.pictures)


class CellView:
    """A cell for the template; its ids start with `id`."""

    def __init__(self, index: int, cell: Cell) -> None:
        self.cell, self.id = cell, f"cell{index + 1}"
        self.verdict, self.notes = text.verdict(cell), list(text.notes(cell))
        self.arms = ranked(cell)
        none = cell.arms[0].name if cell.arms else "none"
        against = {arm.name: arm.against_none for arm in self.arms if arm.against_none}
        self.pictures = [
            figures.differences({name: of[metric] for name, of in against.items()}, metric, f"{self.id}-{metric}", none)
            for metric in (METRICS if against else ())
        ]
        self.table = rows(self.arms)
        self.failed = [question for question, holds, _ in text.controls(cell) if holds is False]
        self.sections = list(_sections(self.id, cell))


def ranked(cell: Cell) -> list[ArmSummary]:
    """Regularizers by accuracy, then references and controls."""

    def rank(arm: ArmSummary) -> tuple[bool, bool, float]:
        mean = arm.against_none["accuracy"].mean if arm.against_none else 0.0
        return not arm.compared, not math.isfinite(mean), -mean

    return sorted(cell.arms, key=rank)


def _sections(ident: str, cell: Cell) -> Iterable[Section]:
    yield Section("Controls", "Is the comparison valid?", list(text.control_sentences(cell)))
    arms = [(arm.name, metric, arm.against_none[metric]) for arm in cell.arms if arm.against_none for metric in METRICS]
    note = "All numbers of the differences from none. MDE: the difference that a paired t test detects with 80 % power."
    yield Section("Differences from none", note, table=_numbers(arms))
    pairs = [(f"{pair.a} − {pair.b}", pair.metric, pair.difference) for pair in cell.between]
    note = "Paired differences, with Holm’s correction over all pairs in a metric."
    yield Section("Between regularizers", note, table=_numbers(pairs))
    drawn = [figures.curves(cell.arms, what, f"{ident}-{what}", *labels) for what, labels in CURVES.items()]
    yield Section("Curves", "Median over the seeds, with quartile bands, on validation images.", pictures=drawn)
    cost = pd.DataFrame(
        {"Arm": arm.name}
        | {
            head: f"{number(of.median, 3)} [{number(of.low, 3)}, {number(of.high, 3)}]" if of else ABSENT
            for head, of in (("Time / none [quartiles]", arm.time), ("Memory / none", arm.memory))
        }
        for arm in cell.arms
        if arm.time or arm.memory
    )
    yield Section("Cost", "Of a training step at the final rate, interleaved with none, after training.", table=cost)
    trials = pd.DataFrame(
        {
            "Arm": arm.name,
            "Settings": ", ".join(f"{name} = {value:.4g}" for name, value in trial.settings.items()),
            "Score": number(trial.score, 4) if trial.score is not None else "failed",
            "Chosen": "chosen" if trial.settings == arm.tuning.chosen else "",
        }
        for arm in cell.arms
        if arm.tuning
        for trial in arm.tuning.trials
    )
    note = "The score is the mean validation NLL over the tuning seeds; lower is better."
    yield Section("Tuning", note, table=trials)
    calls = pd.DataFrame(
        {
            "Arm": arm.name,
            "Call": arm.call + (f" (tuned like {arm.like})" if arm.like else ""),
            "Layers": ", ".join(arm.layers),
            "Sites": str(arm.sites),
            "Warnings": " ".join(arm.flags),
        }
        for arm in cell.arms
    )
    yield Section("Arms", "The command below with --only ARM repeats the runs of one arm.", table=calls)
    seeds = pd.DataFrame(
        {"Arm": arm.name, "Seed": str(seed)}
        | {SHORT[metric]: number(arm.values[metric][i], DECIMALS[metric] + 1) for metric in METRICS}
        for arm in cell.arms
        for i, seed in enumerate(arm.seeds)
    )
    excluded = [f"{arm.name}, seed {seed}: {why}" for arm in cell.arms for seed, why in arm.set_aside.items()]
    yield Section("Runs", "Every run after its last epoch, and the excluded pairs.", excluded, table=seeds)


def _numbers(found: Sequence[tuple[str, Metric, Difference]]) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "Arm": name,
            "Metric": SHORT[metric],
            "Difference": number(one.mean, DECIMALS[metric], "+"),
            "[95 % over seeds]": _limits(one.low, one.high, metric),
            "[95 % over seeds and images]": _limits(one.low_images, one.high_images, metric),
            "Verdict": UNCLEAR if not one.clear else "better" if one.better(metric) else "worse",
            "p (smallest)": f"{probability(one.p)} (≥ {probability(one.p_smallest)})",
            "Holm’s p": probability(one.p_holm),
            "MDE": number(one.mde, DECIMALS[metric]),
            "Pairs (for half the MDE)": f"{len(one.seeds)} ({one.seeds_for_half or ABSENT})",
        }
        for name, metric, one in found
    )


def _about(summary: Summary) -> list[Section]:
    """The parts about the whole comparison."""
    failures = pd.DataFrame([failure.model_dump() for failure in summary.failures])
    flat = pd.json_normalize([one.details | {"runs": one.runs} for one in summary.environments]).T.fillna(ABSENT)
    flat.columns = [f"Environment {i + 1}" for i in range(len(summary.environments))]
    flat.insert(0, "", flat.index)
    return [
        Section("Failed runs", "Runs without an outcome; their pairs are excluded.", table=failures),
        Section("Environments", "Software and hardware of the runs.", table=flat),
    ]


def number(value: float | None, decimals: int = 2, sign: str = "") -> str:
    """Format a number; a dash if it is missing or not finite."""
    return ABSENT if value is None or not math.isfinite(value) else f"{value:{sign}.{decimals}f}".replace("-", "−")


def probability(p: float) -> str:
    """Format a p-value with three decimals, or two significant digits below 0.001."""
    return number(p, 3) if not p < 0.001 else f"{p:.1e}".replace("e-0", "e-").replace("-", "−")


def _limits(low: float, high: float, metric: Metric) -> str:
    return f"[{number(low, DECIMALS[metric], '+')}, {number(high, DECIMALS[metric], '+')}]"

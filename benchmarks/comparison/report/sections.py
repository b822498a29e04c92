"""The parts of a cell in the report: the table of arms, and what opens below it, as pandas tables and figures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
from markupsafe import Markup

from comparison.analysis import text
from comparison.analysis.schema import BETTER, DECIMALS, METRICS, ArmSummary, Cell, Difference, Metric, Spread, Summary
from comparison.report import figures
from comparison.report.numbers import general, interval, plain, probability, signed

CURVES = {
    "train_loss": "Training loss",
    "validation_accuracy": "Validation accuracy, %",
    "validation_nll": "Validation NLL, nats",
}
HEADS: dict[Metric, str] = {"accuracy": "Accuracy", "nll": "NLL", "ece": "ECE"}


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
        self.verdict, self.findings = text.verdict(cell), list(text.findings(cell))
        self.arms = sorted(cell.arms, key=_rank)
        none = cell.arms[0].name if cell.arms else "none"
        against = [(arm, arm.against_none) for arm in self.arms if arm.against_none]
        self.pictures = [
            figures.differences({arm.name: of[metric] for arm, of in against}, metric, f"{self.id}-{metric}", none)
            for metric in METRICS
            if against
        ]
        self.table = pd.DataFrame([_row(arm) for arm in self.arms])
        self.failed = [question for question, holds, _ in text.controls(cell) if holds is False]
        self.sections = [*_statistics(cell), *_measurements(self.id, cell), *_setup(cell)]


def _rank(arm: ArmSummary) -> tuple[bool, bool, float]:
    """Regularizers by accuracy, then references and controls."""
    mean = arm.against_none["accuracy"].mean if arm.against_none else 0.0
    return arm.kind in ("control", "reference"), not math.isfinite(mean), -mean


def _row(arm: ArmSummary) -> dict[str, str]:
    row = {"Arm": arm.name, "Kind": arm.kind, "Seeds": str(len(arm.seeds))}
    for metric in METRICS:
        head, found = HEADS[metric], (arm.against_none or {}).get(metric)
        row[head] = plain(arm.means.get(metric), DECIMALS[metric])
        row[f"{head} − none [95 %]"] = _interval(found, metric)
        row[f"{head}: Holm’s p"] = (
            probability(found.p_holm) if found and arm.kind not in ("control", "reference") else "–"
        )
    return row | {"Excluded pairs": str(len(arm.set_aside))}


def _interval(found: Difference | None, metric: Metric) -> str:
    return "–" if found is None else f"{signed(found.mean, DECIMALS[metric])} {interval(found.low, found.high, metric)}"


def _statistics(cell: Cell) -> Iterable[Section]:
    yield Section("Caveats", sentences=text.caveats(cell))
    yield Section("Controls", "Is the comparison valid?", list(text.control_sentences(cell)))
    pairs = [(f"{pair.a} − {pair.b}", pair.metric, pair.difference) for pair in cell.between]
    note = "Paired differences, with Holm’s correction over all pairs in a metric."
    yield Section("Between regularizers", note, table=_numbers(pairs))
    arms = [(arm.name, metric, arm.against_none[metric]) for arm in cell.arms if arm.against_none for metric in METRICS]
    note = "All numbers of the differences from none. MDE: the difference that a paired t test detects with 80 % power."
    yield Section("Differences from none", note, table=_numbers(arms))


def _numbers(found: Sequence[tuple[str, Metric, Difference]]) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "Arm": name,
            "Metric": HEADS[metric],
            "Difference [95 % over seeds]": _interval(one, metric),
            "[95 % over seeds and images]": interval(one.low_images, one.high_images, metric),
            "Verdict": one.verdict if one.verdict == text.UNCLEAR else _side(one, metric),
            "p (smallest)": f"{probability(one.p)} (≥ {probability(one.p_smallest)})",
            "Holm’s p": probability(one.p_holm),
            "MDE": plain(one.mde, DECIMALS[metric]),
            "Pairs (for half the MDE)": f"{len(one.seeds)} ({one.seeds_for_half or '–'})",
        }
        for name, metric, one in found
    )


def _side(found: Difference, metric: Metric) -> str:
    return "better" if (found.verdict == "above") == (BETTER[metric] > 0) else "worse"


def _measurements(ident: str, cell: Cell) -> Iterable[Section]:
    arms = cell.arms
    pictures = [figures.curves(arms, what, f"{ident}-{what}", label, "epoch") for what, label in CURVES.items()]
    yield Section("Curves", "Median over the seeds, with quartile bands, on validation images.", pictures=pictures)
    rate = figures.curves(
        [arm for arm in arms if arm.kind != "control"], "rate", f"{ident}-rate", "rate", "optimizer step"
    )
    rates = pd.DataFrame(
        {"Arm": arm.name, "Site": site, "Requested": plain(asked, 4), "Dropped": plain(dropped, 4) + _half(half)}
        for arm in arms
        if arm.dropped is not None
        for site, asked, dropped, half in [
            ("all", arm.asked, arm.dropped, arm.dropped_half),
            *((site.name, site.asked, site.dropped, None) for site in arm.realised),
        ]
    )
    yield Section("Rates", "The rate, and the fraction dropped in the last steps.", pictures=[rate], table=rates)
    yield Section(
        "Calibration",
        "Over all seeds. On the diagonal, the accuracy equals the confidence.",
        pictures=[figures.calibration(arms, f"{ident}-calibration")],
    )
    cost = pd.DataFrame(
        {"Arm": arm.name, "Time / none [quartiles]": _spread(arm.time), "Memory / none": _spread(arm.memory)}
        for arm in arms
        if arm.time or arm.memory
    )
    yield Section("Cost", "Of a training step at the final rate, interleaved with none, after training.", table=cost)


def _half(value: float | None) -> str:
    return "" if value is None else f" ± {plain(value, 4)}"


def _spread(found: Spread | None) -> str:
    return "–" if found is None else f"{plain(found.median, 3)} [{plain(found.low, 3)}, {plain(found.high, 3)}]"


def _setup(cell: Cell) -> Iterable[Section]:
    trials = pd.DataFrame(
        {
            "Arm": arm.name,
            "Method": arm.tuning.method,
            "Settings": _settings(trial.settings),
            "Score": plain(trial.score, 4) if trial.score is not None else "failed",
            "Chosen": "chosen" if trial.settings == arm.tuning.chosen else "",
        }
        for arm in cell.arms
        if arm.tuning
        for trial in arm.tuning.trials
    )
    yield Section(
        "Tuning", "The score is the mean validation NLL over the tuning seeds; lower is better.", table=trials
    )
    commands = pd.DataFrame(
        {
            "Arm": arm.name,
            "Call": arm.call,
            "Layers": ", ".join(arm.layers),
            "Sites": str(arm.sites),
            "Warnings": " ".join(arm.flags),
            "Command": arm.command,
        }
        for arm in cell.arms
    )
    yield Section("Arms", "Each command reproduces the arm’s runs.", table=commands)
    seeds = pd.DataFrame(
        {"Arm": arm.name, "Seed": str(seed)}
        | {HEADS[metric]: plain(arm.values[metric][i], DECIMALS[metric] + 1) for metric in METRICS}
        for arm in cell.arms
        for i, seed in enumerate(arm.seeds)
    )
    excluded = [f"{arm.name}, seed {seed}: {why}" for arm in cell.arms for seed, why in arm.set_aside.items()]
    yield Section("Runs", "Every run after its last epoch, and the excluded pairs.", excluded, table=seeds)


def _settings(settings: Mapping[str, float]) -> str:
    return ", ".join(f"{name} = {general(value)}" for name, value in settings.items())


def about(summary: Summary) -> list[Section]:
    """The parts about the whole comparison."""
    failures = [failure.model_dump() for failure in summary.failures]
    flat = [_flat(environment.details) | {"runs": str(environment.runs)} for environment in summary.environments]
    table = pd.DataFrame(flat).T.fillna("–")
    table.columns = [f"Environment {i + 1}" for i in range(len(flat))]
    table.insert(0, "", table.index)
    return [
        Section("Failed runs", "Runs without an outcome; their pairs are excluded.", table=pd.DataFrame(failures)),
        Section("Environments", "Software and hardware of the runs.", table=table),
    ]


def _flat(details: Mapping[str, Any]) -> dict[str, str]:
    flat: dict[str, Any] = pd.json_normalize(dict(details)).iloc[0].to_dict() if details else {}
    return {name: str(value) for name, value in flat.items()}

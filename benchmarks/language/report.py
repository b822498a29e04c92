"""Compare the arms of the study, and write `summary.json` and `report.html`."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure

from comparison.analysis import text
from comparison.analysis.inference import IMAGE_RESAMPLES, RunMetric, difference, holm_corrected, resamples
from comparison.analysis.schema import LEVEL, Difference
from comparison.engines.store import replace_file
from comparison.report import figures, page
from language.arms import MODELS, NONE
from language.training import EVERY

ZERO, OTHER = "p = 0 injected", "none with other seeds"
SMALLEST = 0.02
"""The smallest effect of interest: 2 % of the perplexity, a difference of 0.02 nats."""
Records = Mapping[tuple[str, str, int], Mapping[str, Any]]
"""By model, arm and seed of the pair."""


def write(records: Records, tuned: Mapping[tuple[str, str], tuple[float, float]], costs: Any, out: Path) -> int:
    """Write both files. Return 1 if a control does not hold."""
    pairs = dict.fromkeys((model, test) for (model, _, _), record in records.items() for test in record["paragraphs"])
    cells = [_cell(records, *pair) for pair in pairs]
    first = next(iter(records.values()))
    summary = {
        "seconds": sum(record["seconds"] for record in records.values()),
        **{name: first[name] for name in ("words", "removed", "environment")},
        "corpus": first["run"]["corpus"],
        "tuned": {f"{model}: {arm}": settings for (model, arm), settings in tuned.items()},
        "costs": costs,
        "controls": {model: _controls(records, model) for model in dict.fromkeys(model for model, _, _ in records)},
        "cells": cells,
    }
    replace_file(out / "summary.json", json.dumps(summary, indent=1).encode())
    replace_file(out / "report.html", render(summary).encode())
    return 0 if all(one["holds"] for one in summary["controls"].values()) else 1


def _cell(records: Records, model: str, test: str) -> dict[str, Any]:
    """One model on one test set: each arm with its perplexity and its difference from none in nats per token."""
    metrics: dict[str, dict[int, RunMetric]] = {}
    curves: dict[str, Any] = {}
    for (of, arm, seed), record in records.items():
        if of == model:
            metrics.setdefault(arm, {})[seed] = _metric(np.array(record["paragraphs"][test]))
            curves.setdefault(arm, []).append((record["train_loss"], list(record["validation_loss"].values())))
    names = [name for name in metrics if name not in (NONE, ZERO, OTHER)]
    found = dict(zip(names, holm_corrected([difference(metrics[name], metrics[NONE]) for name in names]), strict=True))
    found[OTHER] = difference(metrics[OTHER], metrics[NONE])
    between = {f"{a} − {b}": difference(metrics[a], metrics[b]) for a, b in MODELS[model]["contrasts"]}
    corrected = holm_corrected([*between.values()])
    return {
        "model": model,
        "test": test,
        "perplexity": {name: math.exp(np.mean([run.value for run in runs.values()])) for name, runs in metrics.items()},
        "log_perplexity": {name: [run.value for run in runs.values()] for name, runs in metrics.items()},
        "differences": {name: one.model_dump() for name, one in found.items()},
        "contrasts": {name: one.model_dump() for name, one in zip(between, corrected, strict=True)},
        "curves": {
            name: [np.mean(of, axis=0).tolist() for of in zip(*runs, strict=True)] for name, runs in curves.items()
        },
    }


def _metric(sums_P2: Any) -> RunMetric:
    """The loss per token, and on bootstrap samples of the paragraphs."""
    counts_BP = resamples(len(sums_P2), IMAGE_RESAMPLES, 1).astype(np.float64)
    again_B2 = counts_BP @ sums_P2
    total_2 = sums_P2.sum(axis=0)
    return RunMetric(float(total_2[0] / total_2[1]), again_B2[:, 0] / again_B2[:, 1])


def _controls(records: Records, model: str) -> dict[str, Any]:
    """Whether p = 0 changes no bit, and whether all arms of a seed start with the same weights."""
    seeds = sorted({seed for of, arm, seed in records if (of, arm) == (model, NONE)})
    ends = {key: (record["weights_after"], record["paragraphs"]) for key, record in records.items()}
    equal = [ends[model, ZERO, seed] == ends[model, NONE, seed] for seed in seeds]
    starts = [
        record["weights_before"] == records[model, NONE, seed]["weights_before"]
        for (of, arm, seed), record in records.items()
        # A peer with one stacked nn.LSTM draws its weights in another order.
        if of == model and arm != OTHER and record["run"]["model"] != "stacked"
    ]
    return {"equal": sum(equal), "seeds": len(seeds), "paired": all(starts), "holds": all(equal) and all(starts)}


def render(summary: Mapping[str, Any]) -> str:
    """The report as HTML: for each cell a verdict, the picture, the table; then curves, settings and controls."""
    environment = text.environment(Path(__file__).parent, autoescape=True)
    views = [_view(index, cell) for index, cell in enumerate(summary["cells"])]
    style = Markup((page.HERE / "style.css").read_text(encoding="utf-8"))
    return environment.get_template("page.html.j2").render(summary=summary, cells=views, style=style)


def _view(index: int, cell: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: Difference(**one) for name, one in cell["differences"].items()}
    ranked = dict(sorted(found.items(), key=lambda item: item[1].mean))
    arms = {name: one for name, one in ranked.items() if name != OTHER}
    better = [name for name, one in arms.items() if one.high < -SMALLEST and one.p_holm <= LEVEL]
    return {
        **cell,
        "differences": ranked,
        "better": better,
        "worse": [name for name, one in arms.items() if one.called("nll") == "worse"],
        "picture": figures.differences({arm: {"nll": one} for arm, one in ranked.items()}, f"c{index}", NONE, [OTHER]),
        "lines": _curves(cell["curves"], f"l{index}"),
    }


def _curves(curves: Mapping[str, Any], ident: str) -> Markup:
    """The mean training loss (thin) and validation loss (thick) of each arm by epoch."""
    with mpl.rc_context(figures.SETTINGS):
        figure = Figure(figsize=(9, 5), layout="constrained")
        axes = figure.subplots()
        for number, (name, (train, validation)) in enumerate(curves.items()):
            measured = [min(EVERY * (i + 1), len(train)) for i in range(len(validation))]
            style: Any = {"color": f"C{number}", "ls": ("-", "--")[number // 10]}
            axes.plot(measured, validation, lw=2, label=name, **style)
            axes.plot(range(1, len(train) + 1), train, lw=0.7, **style)
        axes.set(xlabel="epoch", ylabel="nats per token: validation thick, training thin")
        axes.legend(fontsize=9)
        return figures.inline(figure, ident, "Training and validation loss by epoch")

"""Synthetic summaries for tests of the report."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from comparison.analysis.schema import (
    METRICS,
    ArmSummary,
    Band,
    Bin,
    Cell,
    Contrast,
    Controls,
    Difference,
    Environment,
    FailedRun,
    Metric,
    Site,
    Spread,
    Summary,
)
from comparison.spec.tuning import Trial, Tuning

NAMES = (
    "none", "DropBlock", "Dropout", "Dropout2d", "DropPath", "GaussianNoise", "DropBlock (as in the paper)",
    "torchvision DropBlock (equal p)", "torchvision DropBlock (equal fraction)", "timm DropPath",
    "A/A: DropBlock(p=0)", "none (other seeds)",
)  # fmt: skip
KINDS = {
    "none": "none",
    "DropBlock (as in the paper)": "recipe",
    "A/A: DropBlock(p=0)": "control",
    "none (other seeds)": "control",
}
STEPS = 400
EFFECTS = {
    "DropBlock": 1.7,
    "DropBlock (as in the paper)": 1.4,
    "Dropout": 1.2,
    "Dropout2d": 1.5,
    "GaussianNoise": 0.5,
    "timm DropPath": -0.9,
}
SPREAD: dict[Metric, float] = {"accuracy": 1.0, "nll": 0.04, "ece": 0.6}
BASE: dict[Metric, float] = {"accuracy": 93.7, "nll": 0.27, "ece": 3.4}
PER_POINT: dict[Metric, float] = {"accuracy": 1.0, "nll": -0.05, "ece": -0.4}


def summary(cells: int = 1, arms: int = 12, seeds: int = 16, *, seed: int = 0, **others: Any) -> Summary:
    """A comparison with one failed run; keywords replace fields."""
    rng = np.random.default_rng(seed)
    # The controls come last, and are kept if there are fewer arms.
    names = (*NAMES[: max(1, arms - 2)], *NAMES[-2:]) if arms > 2 else NAMES[:arms]
    data = ["digits", "digits-noisy", "synthetic-cue"]
    fields: dict[str, Any] = {
        "title": "Regularizers on small images",
        "created": "2024-05-17T09:30:00+00:00",
        "command": "python benchmarks/compare.py --config benchmarks/configs/digits.yaml",
        "config": "data: [digits]\nseeds: 16\narms:\n  - call: DropBlock(block_size=3)\n    layers: ['layer3.**']\n",
        "seeds": seeds,
        "cells": [cell(f"resnet18 on {data[i % 3]} (100 images)", names, seeds, rng) for i in range(cells)],
        "failures": [failure("Dropout", 3)],
        "environments": [environment()],
        "seconds": 5230.0,
    }
    return Summary(**(fields | others))


def cell(title: str, names: tuple[str, ...], seeds: int, rng: np.random.Generator) -> Cell:
    """A cell whose arms differ by EFFECTS."""
    none = {metric: BASE[metric] + SPREAD[metric] * rng.standard_normal(seeds) for metric in METRICS}
    arms = [arm(name, i, none, seeds, rng) for i, name in enumerate(names)]
    shown = [found for found in arms if found.kind not in ("none", "control")][:6]
    return Cell(
        title=title,
        epochs=40,
        steps=STEPS,
        train_images=100,
        test_images=797,
        skipped_images=0,
        arms=arms,
        between=[
            Contrast(a=a.name, b=b.name, metric=metric, difference=difference(np.array(a.values[metric]) - np.array(b.values[metric])))
            for a, b in itertools.combinations(shown, 2)
            for metric in METRICS
        ],
        controls=Controls(aa_equal=seeds, aa_seeds=seeds, none_none=arms[-1].against_none if seeds > 1 else None, paired=True, unchanged=176, hooked=176),
    )  # fmt: skip


def difference(values: np.ndarray) -> Difference:
    """The result for these paired differences, with normal intervals."""
    n = len(values)
    mean, error = float(values.mean()), float(values.std(ddof=1) / math.sqrt(n)) if n > 1 else 0.0
    smallest = min(1.0, 2.0 ** (1 - n))
    p = max(smallest, math.erfc(abs(mean) / error / math.sqrt(2))) if error else 1.0
    low, high = mean - 1.96 * error, mean + 1.96 * error
    return Difference(
        seeds=list(range(n)),
        values=values.tolist(),
        mean=mean,
        low=low,
        high=high,
        low_images=mean - 2.6 * error,
        high_images=mean + 2.6 * error,
        p=p,
        p_holm=min(1.0, 9 * p),
        p_smallest=smallest,
        mde=3.0 * error if n > 1 else None,
        seeds_for_half=4 * n if n > 1 else None,
        verdict="above" if low > 0 else "below" if high < 0 else "cannot be distinguished",
    )


def arm(name: str, i: int, none: dict[Metric, np.ndarray], seeds: int, rng: np.random.Generator) -> ArmSummary:
    """An arm of a cell, given the values of none."""
    kind = KINDS.get(name, "peer" if name.startswith(("torchvision", "timm")) else "regularizer")
    drops = kind not in ("none", "control") and name != "GaussianNoise"
    same = kind == "none" or name.startswith("A/A")
    values = {
        metric: none[metric]
        + (
            0
            if same
            else EFFECTS.get(name, 0.1) * PER_POINT[metric] + 0.7 * SPREAD[metric] * rng.standard_normal(seeds)
        )
        for metric in METRICS
    }
    if name == "none (other seeds)":
        values = {
            metric: none[metric] + 0.1 * SPREAD[metric] + _centered(SPREAD[metric] * rng.standard_normal(seeds))
            for metric in METRICS
        }
    epochs, steps = np.arange(1, 41), np.linspace(0, STEPS, 41)
    fade = np.exp(-epochs / (9 + i % 4))
    target = 0.1 if drops else 0.0
    return ArmSummary(
        name=name,
        kind=kind,  # type: ignore[arg-type]
        call="" if kind == "none" else f"{name.split()[0]}(p=0.1, block_size=3)",
        layers=[] if kind == "none" else ["layer3.**.bn1", "layer4.**.bn2"],
        sites=0 if kind == "none" else 4,
        flags=["layer4.1.bn2: the block of 3 covers the whole 2x2 map: it drops channels."] if name == "DropBlock" else [],
        command=f"python benchmarks/compare.py --config benchmarks/configs/digits.yaml --only '{name}'",
        runs=seeds,
        asked=target if drops else None,
        dropped=0.0993 - 0.001 * i if drops else None,
        dropped_half=0.0012 if drops else None,
        rate_at_end=target if drops else None,
        ramp_end=STEPS if drops else None,
        realised=[Site(name=f"layer{3 + j // 2}.{j % 2}.bn1", asked=target, dropped=0.099 - 0.002 * j) for j in range(4)] if drops else [],
        values={metric: found.tolist() for metric, found in values.items()},
        seeds=list(range(seeds)),
        means={metric: float(found.mean()) for metric, found in values.items()},
        against_none=None if kind == "none" else {metric: difference(values[metric] - none[metric]) for metric in METRICS},
        set_aside={3: "Dropout failed: the loss was nan at step 211"} if name == "Dropout" else {},
        train_loss=band(epochs, 2.2 * fade + 0.02 + 0.02 * (i % 3), 0.1),
        validation_accuracy=band(epochs, values["accuracy"].mean() - 80 * fade, 0.01),
        validation_nll=band(epochs, values["nll"].mean() + 2 * fade, 0.08),
        rate=band(steps, target * steps / STEPS, 0.0) if drops else Band(x=[], low=[], median=[], high=[]),
        calibration=[Bin(confidence=0.1 + 0.06 * k, accuracy=min(1.0, 0.08 + 0.058 * k + 0.02 * rng.random()), count=4 + 3 * k**2) for k in range(15)],
        tuning=None if kind == "control" else tuning(i, kind == "none"),
        time=Spread(low=1.01 + 0.02 * i, median=1.03 + 0.02 * i, high=1.06 + 0.02 * i) if drops else None,
        memory=Spread(low=1.0, median=1.0 + 0.004 * i, high=1.02 + 0.004 * i) if drops else None,
    )  # fmt: skip


def _centered(values: np.ndarray) -> np.ndarray:
    return values - values.mean()


def band(x: np.ndarray, median: np.ndarray, share: float) -> Band:
    """A band with the relative half-width `share`."""
    low, high = median * (1 - share), median * (1 + share)
    return Band(x=x.tolist(), low=low.tolist(), median=median.tolist(), high=high.tolist())


def tuning(i: int, none: bool) -> Tuning:
    """A grid of four trials; for every third arm, the best value is the last."""
    name, space = ("weight_decay", [0.01, 0.05, 0.1, 0.2]) if none else ("p", [0.05, 0.1, 0.2, 0.3])
    best = 3 if i % 3 == 1 else 1
    trials = [
        Trial(settings={name: value}, score=0.3 + 0.02 * abs(k - best) if k else None) for k, value in enumerate(space)
    ]
    return Tuning(
        method="grid",
        space={name: space},
        trials=trials,
        seeds=[1000, 1001],
        chosen={name: space[best]},
        at_edge=[name] if best == 3 else [],
    )


def failure(name: str, seed: int) -> FailedRun:
    """A run that failed with a NaN loss."""
    message = "the loss was nan at step 211"
    return FailedRun(
        cell="resnet18 on digits, 100 images",
        arm=name,
        seed=seed,
        stage="final",
        kind="nan",
        message=message,
        key="0f" * 16,
    )


def environment(revision: str = "8f161cd") -> Environment:
    """The environment of the runs."""
    return Environment(
        runs=192,
        details={
            "versions": {"torch": "2.9.0", "hookdrop": "0.6.0"},
            "git": {"revision": revision, "dirty": False},
            "cpu": "8 cores",
        },
    )

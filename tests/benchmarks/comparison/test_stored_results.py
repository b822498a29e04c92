"""The stored results are analyzed again: every estimate, interval and p equals the published one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from comparison.analysis import intervals
from comparison.analysis.inference import RunMetric, difference, holm_corrected
from comparison.analysis.schema import METRICS, ArmSummary, Cell, Difference, Summary
from tests.support.programs import ROOT

STORED = sorted((ROOT / "benchmarks" / "results").glob("*/summary.json"))
EXACT = ("seeds", "values", "p", "p_smallest", "p_holm", "seeds_for_half", "verdict")
CLOSE = ("mean", "low", "high", "mde")


def cells(path: Path) -> list[Cell]:
    return Summary.model_validate_json(path.read_text()).cells


def runs(arm: ArmSummary, metric: Any) -> dict[int, RunMetric]:
    """The values of an arm. Records of single images are not published, so they are not resampled here."""
    return {seed: RunMetric(value, np.zeros(2)) for seed, value in zip(arm.seeds, arm.values[metric], strict=True)}


def same(found: list[Difference], published: list[Difference]) -> None:
    for ours, theirs in zip(holm_corrected(found), published, strict=True):
        assert {name: getattr(ours, name) for name in EXACT} == {name: getattr(theirs, name) for name in EXACT}
        for name in CLOSE:
            expected = getattr(theirs, name)
            expected = None if expected is None else pytest.approx(expected, rel=1e-12, abs=1e-12)
            assert getattr(ours, name) == expected, name
        assert theirs.low_images <= ours.low + 1e-12
        assert ours.high <= theirs.high_images + 1e-12


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.parent.name)
class TestStoredResults:
    def test_differences_from_none(self, path: Path) -> None:
        for cell in cells(path):
            none, *others = cell.arms
            for metric in METRICS:
                for kinds in (True, False):
                    arms = [arm for arm in others if (arm.kind in ("control", "reference")) == kinds]
                    pairs = [(difference(runs(arm, metric), runs(none, metric)), arm.against_none) for arm in arms]
                    published = [against[metric] for _, against in pairs if against]
                    if kinds:  # controls are not corrected
                        for found, theirs in zip(pairs, published, strict=True):
                            same([found[0]], [theirs])
                    else:
                        same([found for found, _ in pairs], published)

    def test_differences_between_regularizers(self, path: Path) -> None:
        for cell in cells(path):
            arms = {arm.name: arm for arm in cell.arms}
            for metric in METRICS:
                between = [pair for pair in cell.between if pair.metric == metric]
                found = [difference(runs(arms[pair.a], metric), runs(arms[pair.b], metric)) for pair in between]
                same(found, [pair.difference for pair in between])


def test_intervals_over_images_are_those_of_the_published_version() -> None:
    """The records of single images are not published, so these numbers were frozen before the analysis changed."""
    rng = np.random.default_rng(5)
    values = rng.normal(0.8, 1, 16)
    again = values[:, None] + rng.normal(0, 0.7, (16, 1)) * 0.1 + rng.normal(0, 0.6, 2000)
    assert intervals.over_both(values, again) == pytest.approx((-0.5193883636054835, 2.0039447789269125), rel=1e-12)

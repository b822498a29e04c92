"""`benchmarks/overhead.py`: output and comparisons. No test depends on a clock."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import overhead
from hookdrop import Dropout, inject
from hookdrop.hooks.hook import SiteHook
from hookdrop.utils.validation import number
from tests.benchmarks.test_calls import count_calls
from tests.support.models import Small
from timing import COUNTS


def test_every_part_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert overhead.main(["--quick", "--threads", "1", "--json", str(tmp_path / "all.json")]) == 0
    text, results = capsys.readouterr().out, json.loads((tmp_path / "all.json").read_text())
    assert list(results) == ["machine", "settings", *overhead.PARTS]
    assert results["settings"]["rounds"] == 3
    for part in (
        results["machine"]["cpu"],
        "the numbers are not reliable",
        *(title for title, _, _ in overhead.ROWS.values()),
    ):
        assert part in text
    for label, row in (pair for part in overhead.ROWS for pair in results[part]["rows"].items()):
        assert label in text
        assert row["low"] <= row["median"] <= row["high"]


def test_twins_share_parameters_and_differ_only_in_hooks() -> None:
    clean = Small().eval()
    other = overhead.twin(clean)
    for tensors in (lambda model: model.parameters(), lambda model: model.buffers()):
        assert all(a is b for a, b in zip(tensors(clean), tensors(other), strict=True))
    assert not {id(m) for m in clean.modules()} & {id(m) for m in other.modules()}
    inject(other, Dropout(0.5), layers="**.bn1")
    assert not any(m._forward_hooks for m in clean.modules())


def test_a_slower_hook_increases_the_measured_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure_calls(jobs: Mapping[str, Callable[[], object]], rounds: int) -> pd.DataFrame:
        """Calls of hookdrop as microseconds, in place of times."""
        for job in jobs.values():
            job()
        counts = [(1e-6 * count_calls(job).total(), 0.0, 0.0) for job in jobs.values()]
        return pd.DataFrame(counts, columns=COUNTS, index=pd.MultiIndex.from_product([jobs, [0]]))

    monkeypatch.setattr(overhead, "measure", measure_calls)
    monkeypatch.setattr(overhead, "CALLS", 7)
    options, call = argparse.Namespace(rounds=1), SiteHook.__call__
    before = overhead.call(options)

    def slow(hook: SiteHook, *given: Any) -> object:
        number(1.0, "p", "test")  # a call of the package
        return call(hook, *given)

    monkeypatch.setattr(SiteHook, "__call__", slow)
    after = overhead.call(options)
    assert before["another module without a hook"] == before["an empty function as hook"] == [0.0]
    for name, values in before.items():
        assert (after[name][0] > values[0]) == name.startswith("hookdrop"), name


def test_interval_covers_the_median_in_95_percent_of_samples() -> None:
    found = [overhead.interval(values) for values in torch.randn(200, 40).exp().tolist()]
    assert 180 <= sum(one["low"] <= 1.0 <= one["high"] for one in found) <= 199

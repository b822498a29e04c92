"""`benchmarks/overhead.py`: output and comparisons.

No test depends on a clock.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import overhead
import timing
from hookdrop import Dropout, inject
from hookdrop.hooks.hook import SiteHook
from tests.support.models import Small
from timing import COUNTS


def count_calls(job: Callable[[], object]) -> int:
    """Count the calls of Python and C functions."""
    count = 0

    def profile(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        job()
    finally:
        sys.setprofile(None)
    return count


def measure_calls(jobs: Mapping[str, Callable[[], object]], rounds: int) -> pd.DataFrame:
    """Like `timing.measure`, with function calls as microseconds."""
    for job in jobs.values():
        job()
    gc.collect()
    gc.disable()  # finalizers would count as calls
    try:
        turns = {(name, 0): (1e-6 * count_calls(job), 0.0, 0.0) for name, job in jobs.items()}
    finally:
        gc.enable()
    return samples(turns)


def samples(turns: Mapping[tuple[str, int], tuple[float, float, float]]) -> pd.DataFrame:
    """What `timing.measure` returns."""
    return pd.DataFrame([*turns.values()], columns=COUNTS, index=pd.MultiIndex.from_tuples(turns))


OPTIONS = argparse.Namespace(quick=True, rounds=1, device="cpu")


def test_every_part_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert overhead.main(["--quick", "--threads", "1", "--json", str(tmp_path / "all.json")]) == 0
    text, results = capsys.readouterr().out, json.loads((tmp_path / "all.json").read_text())
    assert list(results) == ["machine", "settings", *overhead.PARTS]
    assert results["machine"]["cpu"] in text
    assert results["settings"]["rounds"] == 3
    assert "the numbers are not reliable" in text
    assert "…" not in text
    assert "\x1b" not in text
    for part, (title, _, _) in overhead.ROWS.items():
        assert title in text
        for label, row in results[part]["rows"].items():
            assert label in text
            assert row["low"] <= row["median"] <= row["high"]


class TestComparedModels:
    def test_twins_share_parameters_and_differ_only_in_hooks(self) -> None:
        clean = Small().eval()
        other = overhead.twin(clean)
        assert all(a is b for a, b in zip(clean.parameters(), other.parameters(), strict=True))
        assert all(a is b for a, b in zip(clean.buffers(), other.buffers(), strict=True))
        assert not {id(m) for m in clean.modules()} & {id(m) for m in other.modules()}
        inject(other, Dropout(0.5), layers="**.bn1")
        assert not any(m._forward_hooks for m in clean.modules())

    def test_a_slower_hook_increases_the_measured_cost(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(overhead, "measure", measure_calls)
        monkeypatch.setattr(overhead, "CALLS", 7)
        before = overhead.call(OPTIONS)
        call = SiteHook.__call__

        def slow(hook: SiteHook, *given: Any) -> object:
            overhead.empty()
            overhead.empty()
            return call(hook, *given)

        monkeypatch.setattr(SiteHook, "__call__", slow)
        after = overhead.call(OPTIONS)
        assert before["another module without a hook"] == [0.0]
        assert before["an empty function as hook"][0] >= 1.0
        for name, values in before.items():
            more = 3.0 if name.startswith("hookdrop") else 0.0
            assert after[name][0] - values[0] == pytest.approx(more), name


class TestRows:
    def test_interval_covers_the_median_in_95_percent_of_samples(self) -> None:
        found = [overhead.interval(values) for values in torch.randn(200, 40).exp().tolist()]
        assert 180 <= sum(one["low"] <= 1.0 <= one["high"] for one in found) <= 199

    def test_only_rounds_with_both_jobs_are_compared(self) -> None:
        seconds = {("a", 0): 2.0, ("a", 3): 9.0, ("b", 0): 1.0, ("b", 1): 100.0, ("b", 3): 3.0}
        found = samples({turn: (value, 0.0, 0.0) for turn, value in seconds.items()})
        assert timing.ratios(found, "a", "b") == [2.0, 3.0]

"""`benchmarks/overhead.py`: output, comparisons and verdicts; and properties that keep the overhead of hooks low.

No test depends on a clock.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overhead
from hookdrop import Dropout, LateSchedule, inject, plan
from hookdrop.hooks.hook import SiteHook
from hookdrop.injection.verbs import place
from program import make_console
from tests.support.models import Small
from timing import Samples

MAX_CALLS = 20
"""Function calls within the call of an idle hook."""


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


def measure_calls(jobs: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, Samples]:
    """Like `timing.measure`, with function calls as microseconds."""
    for job in jobs.values():
        job()
    gc.collect()
    gc.disable()  # finalizers would count as calls
    try:
        return {name: Samples({0: 1e-6 * count_calls(job)}, {0: 0.0}, {0: 0.0}) for name, job in jobs.items()}
    finally:
        gc.enable()


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
        before = overhead.call(OPTIONS, make_console())
        call = SiteHook.__call__

        def slow(hook: SiteHook, *given: Any) -> object:
            overhead.empty()
            overhead.empty()
            return call(hook, *given)

        monkeypatch.setattr(SiteHook, "__call__", slow)
        after = overhead.call(OPTIONS, make_console())
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
        samples = {"a": Samples({0: 2.0, 3: 9.0}), "b": Samples({0: 1.0, 1: 100.0, 3: 3.0})}
        assert overhead.compared(samples, "a", "b") == [2.0, 3.0]
        assert overhead.compared(samples, "a", "b", 10.0) == [10.0, 60.0]


class TestHookOverhead:
    @pytest.mark.parametrize("frozen", [False, True])
    @pytest.mark.parametrize("at", ["output", "input"])
    def test_eval_hook_makes_constant_number_of_calls(self, at: str, frozen: bool) -> None:
        """The number of calls does not depend on the size of the layer, nor on whether it is frozen."""
        x = torch.ones(2, 4)
        counts = []
        for count in (1, 50):
            model = nn.Sequential(nn.Sequential(*(nn.Identity() for _ in range(count)), nn.Linear(4, 4))).eval()
            model.requires_grad_(not frozen)
            (hook,) = inject(model, Dropout(0.1), layers="0", at=at)._sinks
            with torch.no_grad():
                model(x)
                arguments = (x,), x if at == "output" else {}
                counts.append(count_calls(lambda hook=hook, layer=model[0], args=arguments: hook(layer, *args)))
        assert counts[0] == counts[1] <= MAX_CALLS

    def test_first_call_after_a_step_makes_constant_number_of_calls(self) -> None:
        x = torch.ones(2, 4)
        counts = []
        for count in (1, 50):
            model = nn.Sequential(nn.Sequential(*(nn.Identity() for _ in range(count)), nn.Linear(4, 4)))
            drop = inject(model, Dropout(0.1), layers="0", schedule=LateSchedule(100))
            for _ in range(2):
                model(x)
                drop.step()
            (hook,) = drop._sinks
            counts.append(count_calls(lambda hook=hook, layer=model[0]: hook(layer, (x,), x)))
        assert counts[0] == counts[1] <= MAX_CALLS

    def test_ema_validation_does_not_warn_about_training_in_eval_mode(self) -> None:
        """The weights of an EMA are updated, but it only runs in eval mode."""
        model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        inject(model, Dropout(0.1), layers="*")
        ema = copy.deepcopy(model).eval()
        for _ in range(1000):
            with torch.no_grad():
                ema[0].weight.lerp_(model[0].weight, 0.1)
                ema(torch.ones(2))

    @pytest.mark.parametrize("entries", [["*"], ["[012]", "[34]"]])
    def test_plan_copies_a_regularizer_once_and_each_hook_gets_its_own(self, entries: list[str]) -> None:
        model, given = nn.Sequential(*(nn.Identity() for _ in range(5))), Dropout(0.1)
        drafted = plan(model, dict.fromkeys(entries, given), p_scale="depth")
        planned = [site.regularizer for site in drafted.sites]
        assert len({id(regularizer) for regularizer in (given, *planned)}) == 1 + len(entries)
        given.p = 0.9
        hooks = place(drafted)._sinks
        placed = [hook.regularizer for hook in hooks]
        assert len({id(regularizer) for regularizer in (*planned, *placed)}) == len(entries) + 5
        assert [hook.p for hook in hooks] == pytest.approx([0.02, 0.04, 0.06, 0.08, 0.1])

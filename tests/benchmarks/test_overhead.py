"""`benchmarks/overhead.py`: output, comparisons and verdicts; and properties that keep the overhead of hooks low.

No test depends on a clock.
"""

from __future__ import annotations

import copy
import gc
import io
import json
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from typing import Any

import pytest
import torch
from torch import nn

from hookdrop import Dropout, LateSchedule, inject, plan
from hookdrop.hooks.hook import SiteHook
from hookdrop.injection.verbs import place
from hookdrop.utils import select as layers
from tests.support.models import Small

pytest.importorskip("timm")
pytest.importorskip("torchvision")
pytest.importorskip("rich")
pytest.importorskip("resource")
import overhead
from hook_costs import parts, rows, toy_models
from hook_costs.rows import Estimate, added, milliseconds, ratio
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


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """The output and the results of a smoke test."""
    out = tmp_path_factory.mktemp("overhead")
    with redirect_stdout(io.StringIO()) as printed:
        assert overhead.main(["--quick", "--threads", "1", "--out", str(out)]) == 0
    return printed.getvalue(), json.loads((out / "results.json").read_text())


class TestScript:
    def test_prints_machine_and_settings(self, quick: tuple[str, dict[str, Any]]) -> None:
        text, results = quick
        assert results["machine"]["cpu"] in text
        assert results["machine"]["threads"] == 1
        assert results["settings"]["rounds"] == overhead.QUICK_ROUNDS
        assert "the verdicts are not reliable" in text

    def test_every_part_is_printed_and_written(self, quick: tuple[str, dict[str, Any]]) -> None:
        text, results = quick
        assert list(results) == ["machine", "settings", *parts.PARTS]
        for name, (title, _, _) in parts.PARTS.items():
            assert title in text
            for label, row in results[name]["rows"].items():
                assert label in text
                assert row["low"] <= row["median"] <= row["high"]
                assert row["verdict"] == Estimate(row["low"], row["median"], row["high"]).verdict(row["must"])
                assert 1 <= len(row["values"]) <= overhead.QUICK_ROUNDS

    @pytest.mark.parametrize(
        ("part", "start", "must", "rows"),
        [
            ("forward", "torchvision, ", 1.005, 1),
            ("forward", "timm, ", 1.005, 1),
            ("call", "hookdrop, ", 2.0, 4),
            ("place", "inject, ", 150.0, 4),
            ("plan", "plan, ", 10.0, 10),
            ("step", "step, ", 2.5, 2),
            ("step", "seek, ", 2.5, 2),
            ("step", "follow, ", 2.5, 2),
        ],
    )
    def test_requirements_have_the_documented_values(
        self, quick: tuple[str, dict[str, Any]], part: str, start: str, must: float, rows: int
    ) -> None:
        found = {label: row["must"] for label, row in quick[1][part]["rows"].items() if label.startswith(start)}
        assert list(found.values()).count(must) == rows
        assert set(found.values()) <= {must, None}

    def test_piped_output_is_not_truncated(self, quick: tuple[str, dict[str, Any]]) -> None:
        assert "…" not in quick[0]
        assert "\x1b" not in quick[0]

    @pytest.mark.parametrize("wrong", [["--rounds", "0"], ["--threads", "0"], ["--part", "all of it"]])
    def test_invalid_options_are_rejected(self, wrong: list[str]) -> None:
        with pytest.raises(SystemExit):
            overhead.parse_options(wrong)


def run_without_timing(monkeypatch: pytest.MonkeyPatch, seen: list[str]) -> dict[str, list[str]]:
    """Run each job of a part once; the result will have what each added to `seen`, sorted and without duplicates."""
    found: dict[str, list[str]] = {}

    def run_once(jobs: Mapping[str, Callable[[], object]], *_: object) -> dict[str, Samples]:
        gc.collect()
        for name, job in jobs.items():
            seen.clear()
            job()
            found[name] = sorted(set(seen))
        return {name: Samples({0: 1.0}, {0: 0.0}, {0: 0.0}) for name in jobs}

    monkeypatch.setattr(parts, "measure", run_once)
    return found


class TestComparedModels:
    def test_twins_share_parameters_and_differ_only_in_hooks(self) -> None:
        clean = Small().eval()
        other = toy_models.twin(clean)
        assert all(a is b for a, b in zip(clean.parameters(), other.parameters(), strict=True))
        assert all(a is b for a, b in zip(clean.buffers(), other.buffers(), strict=True))
        assert not {id(m) for m in clean.modules()} & {id(m) for m in other.modules()}
        inject(other, Dropout(0.5), layers="**.bn1")
        assert not any(m._forward_hooks for m in clean.modules())

    def test_forward_part_hooks_every_block(self, monkeypatch: pytest.MonkeyPatch) -> None:
        hooked: list[str] = []
        call = SiteHook.__call__

        def recorded(hook: SiteHook, *given: Any) -> object:
            hooked.append(hook.site)
            return call(hook, *given)

        monkeypatch.setattr(SiteHook, "__call__", recorded)
        found = run_without_timing(monkeypatch, hooked)
        for library, make in list(parts.MODELS.items()):
            monkeypatch.setattr(parts, "MODELS", {library: make})
            parts.forward(overhead.parse_options(["--quick"]), overhead.make_console())
            assert {name: len(sites) for name, sites in found.items()} == {
                "clean": 0, "hooked": 16, "empty hooks": 0, "copy": 0
            }, library  # fmt: skip

    def test_a_slower_hook_increases_the_measured_cost(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(parts, "measure", measure_calls)
        monkeypatch.setattr(parts, "CALLS", 7)
        options, console = overhead.parse_options(["--quick"]), overhead.make_console()
        before = parts.call(options, console)
        call = SiteHook.__call__

        def slow(hook: SiteHook, *given: Any) -> object:
            toy_models.empty()
            toy_models.empty()
            return call(hook, *given)

        monkeypatch.setattr(SiteHook, "__call__", slow)
        after = parts.call(options, console)
        assert before["another module without a hook"].values == [0.0]
        assert before["an empty function as hook"].values[0] >= 1.0
        for name, row in before.items():
            more = 3.0 if name.startswith("hookdrop") else 0.0
            assert after[name].values[0] - row.values[0] == pytest.approx(more), name

    def test_step_seek_and_follow_update_all_sites(self, monkeypatch: pytest.MonkeyPatch) -> None:
        sites: list[str] = []
        set_rate = SiteHook.set_rate

        def recorded(hook: SiteHook, *settings: Any) -> None:
            sites.append(hook.site)
            set_rate(hook, *settings)

        monkeypatch.setattr(SiteHook, "set_rate", recorded)
        found = run_without_timing(monkeypatch, sites)
        monkeypatch.setattr(parts, "STEP_SITES", 3)
        parts.step(overhead.parse_options(["--quick"]), overhead.make_console())
        kinds = [f"{kind}, {title}" for title in ("DropBlock", "Dropout") for kind in ("step", "seek", "follow")]
        assert found == {"optimizer": [], **{kind: ["0", "1", "2"] for kind in kinds}}


class TestEstimates:
    @pytest.mark.parametrize(
        ("low", "high", "must", "verdict"),
        [
            (0.9, 1.0, 1.0, "met"),
            (0.9, 1.1, 1.0, "inconclusive"),
            (1.0, 1.1, 1.0, "inconclusive"),
            (1.01, 1.1, 1.0, "missed"),
            (1.01, 1.1, None, "-"),
        ],
    )
    def test_verdict_depends_on_the_interval(self, low: float, high: float, must: float | None, verdict: str) -> None:
        assert Estimate(low, (low + high) / 2, high).verdict(must) == verdict

    def test_interval_covers_the_median_in_95_percent_of_samples(self) -> None:
        samples = torch.randn(200, 40).exp().tolist()
        inside = sum(found.low <= 1.0 <= found.high for found in map(Estimate.of, samples))
        assert 180 <= inside <= 199

    def test_estimate_of_one_value(self) -> None:
        assert Estimate.of([2.0]) == (2.0, 2.0, 2.0)
        assert Estimate.of([2.0]).text(1) == "2.0 [2.0, 2.0]"

    def test_only_rounds_with_both_jobs_are_compared(self) -> None:
        samples = {"a": Samples({0: 2.0, 3: 9.0}), "b": Samples({0: 1.0, 1: 100.0, 3: 3.0})}
        assert ratio(samples, "a", "b", 1.5) == ([2.0, 3.0], 1.5)
        assert added(samples, "a", "b", 10.0) == ([10.0, 60.0], None)

    def test_first_word_of_a_name_selects_the_bound(self) -> None:
        rows = milliseconds({"plan, x": Samples({0: 0.5}), "planned": Samples({0: 0.25})}, {"plan": 7.0})
        assert rows == {"plan, x": ([500.0], 7.0), "planned": ([250.0], None)}

    def test_a_slower_forward_misses_the_bound(self) -> None:
        clean = {turn: 1.0 + turn % 3 for turn in range(50)}
        samples = {"clean": Samples(clean)}
        for factor, verdict in ((1.001, "met"), (1.01, "missed")):
            samples["hooked"] = Samples({turn: factor * seconds for turn, seconds in clean.items()})
            assert ratio(samples, "hooked", "clean", rows.FORWARD_MAX).numbers()["verdict"] == verdict


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

    def test_plan_walks_the_model_once_for_all_excludes(self, monkeypatch: pytest.MonkeyPatch, model: Small) -> None:
        walked = []
        named_layers = layers.named_layers
        monkeypatch.setattr(layers, "named_layers", lambda model: walked.append(model) or named_layers(model))
        drafted = plan(model, Dropout(0.1), layers="layer?.*", exclude=["layer1.0", "layer1.1", "layer1", "fc"])
        assert [site.name for site in drafted.sites] == ["layer2.0", "layer2.1"]
        assert len(drafted.warnings) == 2
        assert len(walked) == 1

    def test_exclude_accepts_a_generator(self, model: Small) -> None:
        drafted = plan(model, Dropout(0.1), layers="layer?.*", exclude=(name for name in ["layer1.0", "fc"]))
        assert [text.split(" matches")[0] for text in drafted.warnings] == ["exclude 'fc'"]

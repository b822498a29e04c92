"""The benchmark of what hooks cost: that it runs, compares and judges rightly; and what keeps the cost low. No clock."""

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
from hookdrop.injection import select as layers
from tests.support.nets import Small

pytest.importorskip("timm")
pytest.importorskip("torchvision")
pytest.importorskip("rich")
pytest.importorskip("resource")
import overhead
from cost import Samples
from hook_costs import parts, rows, toys
from hook_costs.rows import Estimate, added, milliseconds, ratio

MOST_CALLS = 20
"""Functions that are called in a call of a hook that has nothing to do."""


def events(job: Callable[[], object]) -> int:
    """How many functions, Python's and C's, were called in it."""
    count = 0

    def note(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        job()
    finally:
        sys.setprofile(None)
    return count


def measured_by_events(jobs: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, Samples]:
    """As `cost.measure`, with a clock that counts function calls as microseconds."""
    for job in jobs.values():
        job()
    gc.collect()
    gc.disable()  # what it runs when something dies are calls too
    try:
        return {name: Samples({0: 1e-6 * events(job)}, {0: 0.0}, {0: 0.0}) for name, job in jobs.items()}
    finally:
        gc.enable()


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """What the script prints and writes."""
    out = tmp_path_factory.mktemp("overhead")
    with redirect_stdout(io.StringIO()) as printed:
        assert overhead.main(["--quick", "--threads", "1", "--out", str(out)]) == 0
    return printed.getvalue(), json.loads((out / "results.json").read_text())


class TestTheScript:
    def test_says_what_the_numbers_come_from(self, quick: tuple[str, dict[str, Any]]) -> None:
        text, results = quick
        assert results["machine"]["cpu"] in text
        assert results["machine"]["threads"] == 1
        assert results["settings"]["rounds"] == overhead.QUICK_ROUNDS
        assert "decide nothing" in text

    def test_every_part_is_printed_and_written(self, quick: tuple[str, dict[str, Any]]) -> None:
        text, results = quick
        assert list(results) == ["machine", "settings", *parts.PARTS]
        for name, (title, _, _) in parts.PARTS.items():
            assert title in text
            for what, row in results[name]["rows"].items():
                assert what in text
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
    def test_the_musts_are_those_stated(
        self, quick: tuple[str, dict[str, Any]], part: str, start: str, must: float, rows: int
    ) -> None:
        found = {what: row["must"] for what, row in quick[1][part]["rows"].items() if what.startswith(start)}
        assert list(found.values()).count(must) == rows
        assert set(found.values()) <= {must, None}

    def test_no_line_of_a_pipe_is_cut(self, quick: tuple[str, dict[str, Any]]) -> None:
        assert "…" not in quick[0]
        assert "\x1b" not in quick[0]

    @pytest.mark.parametrize("wrong", [["--rounds", "0"], ["--threads", "0"], ["--part", "all of it"]])
    def test_settings_that_are_none(self, wrong: list[str]) -> None:
        with pytest.raises(SystemExit):
            overhead.parse_options(wrong)


class TestWhatIsCompared:
    def test_the_models_differ_in_their_hooks_alone(self) -> None:
        clean = Small().eval()
        other = toys.twin(clean)
        assert all(a is b for a, b in zip(clean.parameters(), other.parameters(), strict=True))
        assert all(a is b for a, b in zip(clean.buffers(), other.buffers(), strict=True))
        assert not {id(m) for m in clean.modules()} & {id(m) for m in other.modules()}
        inject(other, Dropout(0.5), layers="**.bn1")
        assert not any(m._forward_hooks for m in clean.modules())

    def test_a_hook_on_every_block(self, monkeypatch: pytest.MonkeyPatch) -> None:
        hooked: list[str] = []
        called: dict[str, int] = {}
        call = SiteHook._call

        def noted(hook: SiteHook, module: nn.Module, value: object) -> object:
            hooked.append(hook.site)
            return call(hook, module, value)

        def once(jobs: Mapping[str, Callable[[], object]], rounds: int, device: str) -> dict[str, Samples]:
            for name, job in jobs.items():
                hooked.clear()
                job()
                called[name] = len(set(hooked))
            return {name: Samples({0: 1.0}, {0: 0.0}, {0: 0.0}) for name in jobs}

        monkeypatch.setattr(SiteHook, "_call", noted)
        monkeypatch.setattr(parts, "measure", once)
        for library, make in list(parts.MODELS.items()):
            monkeypatch.setattr(parts, "MODELS", {library: make})
            parts.forward(overhead.parse_options(["--quick"]), overhead.make_console())
            assert called == {"clean": 0, "hooked": 16, "empty hooks": 0, "copy": 0}, library

    def test_a_slower_hook_is_noticed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(parts, "measure", measured_by_events)
        monkeypatch.setattr(parts, "CALLS", 7)
        options, console = overhead.parse_options(["--quick"]), overhead.make_console()
        before = parts.call(options, console)
        call = SiteHook._call

        def slow(hook: SiteHook, module: nn.Module, value: object) -> object:
            toys.empty()
            toys.empty()
            return call(hook, module, value)

        monkeypatch.setattr(SiteHook, "_call", slow)
        after = parts.call(options, console)
        assert before["another module without a hook"].values == [0.0]
        assert before["an empty function as hook"].values[0] >= 1.0
        for name, row in before.items():
            more = 3.0 if name.startswith("hookdrop") else 0.0
            assert after[name].values[0] - row.values[0] == pytest.approx(more), name

    def test_every_kind_of_step_moves_all_sites(self, monkeypatch: pytest.MonkeyPatch) -> None:
        refreshed: list[str] = []
        moved: dict[str, list[str]] = {}
        set_rate = SiteHook.set_rate

        def noted(hook: SiteHook, *settings: Any) -> None:
            refreshed.append(hook.site)
            set_rate(hook, *settings)

        def once(jobs: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, Samples]:
            gc.collect()
            for name, job in jobs.items():
                refreshed.clear()
                job()
                moved[name] = sorted(set(refreshed))
            return {name: Samples({0: 1.0}, {0: 0.0}, {0: 0.0}) for name in jobs}

        monkeypatch.setattr(SiteHook, "set_rate", noted)
        monkeypatch.setattr(parts, "measure", once)
        monkeypatch.setattr(parts, "STEP_SITES", 3)
        parts.step(overhead.parse_options(["--quick"]), overhead.make_console())
        kinds = [f"{kind}, {title}" for title in ("DropBlock", "Dropout") for kind in ("step", "seek", "follow")]
        assert moved == {"optimizer": [], **{kind: ["0", "1", "2"] for kind in kinds}}


class TestEstimates:
    @pytest.mark.parametrize(
        ("low", "high", "must", "verdict"),
        [
            (0.9, 1.0, 1.0, "holds"),
            (0.9, 1.1, 1.0, "cannot be distinguished"),
            (1.0, 1.1, 1.0, "cannot be distinguished"),
            (1.01, 1.1, 1.0, "misses"),
            (1.01, 1.1, None, "-"),
        ],
    )
    def test_the_interval_decides(self, low: float, high: float, must: float | None, verdict: str) -> None:
        assert Estimate(low, (low + high) / 2, high).verdict(must) == verdict

    def test_the_interval_holds_the_median_about_95_times_of_100(self) -> None:
        samples = torch.randn(200, 40).exp().tolist()
        inside = sum(found.low <= 1.0 <= found.high for found in map(Estimate.of, samples))
        assert 180 <= inside <= 199

    def test_one_value(self) -> None:
        assert Estimate.of([2.0]) == (2.0, 2.0, 2.0)
        assert Estimate.of([2.0]).text(1) == "2.0 [2.0, 2.0]"

    def test_what_is_compared_ran_in_the_same_round(self) -> None:
        samples = {"a": Samples({0: 2.0, 3: 9.0}), "b": Samples({0: 1.0, 1: 100.0, 3: 3.0})}
        assert ratio(samples, "a", "b", 1.5) == ([2.0, 3.0], 1.5)
        assert added(samples, "a", "b", 10.0) == ([10.0, 60.0], None)

    def test_a_must_goes_by_the_first_word(self) -> None:
        rows = milliseconds({"plan, x": Samples({0: 0.5}), "planned": Samples({0: 0.25})}, {"plan": 7.0})
        assert rows == {"plan, x": ([500.0], 7.0), "planned": ([250.0], None)}

    def test_a_slower_forward_misses(self) -> None:
        clean = {turn: 1.0 + turn % 3 for turn in range(50)}
        samples = {"clean": Samples(clean)}
        for factor, verdict in ((1.001, "holds"), (1.01, "misses")):
            samples["hooked"] = Samples({turn: factor * seconds for turn, seconds in clean.items()})
            assert ratio(samples, "hooked", "clean", rows.FORWARD_MUST).numbers()["verdict"] == verdict


class TestWhatKeepsTheCostLow:
    @pytest.mark.parametrize("frozen", [False, True])
    @pytest.mark.parametrize("at", ["output", "input"])
    def test_in_eval_mode_a_hook_looks_at_nothing_of_its_layer(self, at: str, frozen: bool) -> None:
        """Be it a layer or half a model, trained or frozen."""
        x = torch.ones(2, 4)
        counts = []
        for count in (1, 50):
            model = nn.Sequential(nn.Sequential(*(nn.Identity() for _ in range(count)), nn.Linear(4, 4))).eval()
            model.requires_grad_(not frozen)
            (hook,) = inject(model, Dropout(0.1), layers="0", at=at)._hooks
            with torch.no_grad():
                model(x)
                counts.append(events(lambda hook=hook, layer=model[0]: hook(layer, (x,), x if at == "output" else {})))
        assert counts[0] == counts[1] <= MOST_CALLS

    def test_nor_in_the_first_call_after_a_step(self) -> None:
        x = torch.ones(2, 4)
        counts = []
        for count in (1, 50):
            model = nn.Sequential(nn.Sequential(*(nn.Identity() for _ in range(count)), nn.Linear(4, 4)))
            drop = inject(model, Dropout(0.1), layers="0", schedule=LateSchedule(100))
            for _ in range(2):
                model(x)
                drop.step()
            (hook,) = drop._hooks
            counts.append(events(lambda hook=hook, layer=model[0]: hook(layer, (x,), x)))
        assert counts[0] == counts[1] <= MOST_CALLS

    def test_validation_of_an_ema_is_not_taken_for_training_in_eval_mode(self) -> None:
        """Its weights are written to, and it only ever runs in eval mode."""
        model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        inject(model, Dropout(0.1), layers="*")
        ema = copy.deepcopy(model).eval()
        for _ in range(1000):
            with torch.no_grad():
                ema[0].weight.lerp_(model[0].weight, 0.1)
                ema(torch.ones(2))

    @pytest.mark.parametrize("entries", [["*"], ["[012]", "[34]"]])
    def test_a_plan_copies_a_regularizer_once_and_each_hook_has_its_own(self, entries: list[str]) -> None:
        model, given = nn.Sequential(*(nn.Identity() for _ in range(5))), Dropout(0.1)
        drafted = plan(model, dict.fromkeys(entries, given), p_scale="depth")
        planned = [site.regularizer for site in drafted.sites]
        assert len({id(regularizer) for regularizer in (given, *planned)}) == 1 + len(entries)
        given.p = 0.9
        hooks = drafted.apply()._hooks
        placed = [hook.regularizer for hook in hooks]
        assert len({id(regularizer) for regularizer in (*planned, *placed)}) == len(entries) + 5
        assert [hook.p for hook in hooks] == pytest.approx([0.02, 0.04, 0.06, 0.08, 0.1])

    def test_a_model_is_walked_once_however_much_is_excluded(
        self, monkeypatch: pytest.MonkeyPatch, model: Small
    ) -> None:
        walked = []
        named_layers = layers.named_layers
        monkeypatch.setattr(layers, "named_layers", lambda model: walked.append(model) or named_layers(model))
        drafted = plan(model, Dropout(0.1), layers="layer?.*", exclude=["layer1.0", "layer1.1", "layer1", "fc"])
        assert [site.name for site in drafted.sites] == ["layer2.0", "layer2.1"]
        assert len(drafted.warnings) == 2
        assert len(walked) == 1

    def test_excludes_of_a_generator_are_looked_at_too(self, model: Small) -> None:
        drafted = plan(model, Dropout(0.1), layers="layer?.*", exclude=(name for name in ["layer1.0", "fc"]))
        assert [text.split(" matches")[0] for text in drafted.warnings] == ["exclude 'fc'"]

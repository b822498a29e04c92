"""The benchmarks of speed and memory: that they run, count and compare rightly. No clock is asserted."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import hookdrop
from hookdrop.kernels import native as kernel

pytest.importorskip("timm")
pytest.importorskip("torchvision")
pytest.importorskip("matplotlib")
pytest.importorskip("rich")
pytest.importorskip("resource")
import cost
import memory
import peers
from cost import Samples, Spread
from tests.support.paths import ROOT
from thresholds import THRESHOLDS, Threshold

BENCHMARKS = ROOT / "benchmarks"


SHAPES = ["2x4x28x28", "3x2x22x21"]


def run(script: str, *arguments: str, **environment: str) -> str:
    """The script as a person runs it; what it prints."""
    command = [sys.executable, str(BENCHMARKS / script), "--threads", "1", "--shapes", *SHAPES, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)
    assert done.returncode == 0, done.stderr
    assert "HookdropWarning" not in done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def speed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any], Path]:
    """What all parts print, write and draw."""
    out = tmp_path_factory.mktemp("speed")
    text = run("speed.py", "--quick", "--rounds", "4", "--elements", "5e4", "--backend", "eager", "--out", str(out))
    return text, json.loads((out / "results.json").read_text()), out


class TestSpeed:
    def test_says_what_the_numbers_come_from(self, speed: tuple[str, dict[str, Any], Path]) -> None:
        text, results, _ = speed
        machine = results["machine"]
        assert machine["threads"] == 1
        assert machine["kernel"] == kernel.available()
        assert machine["versions"]["hookdrop"] == hookdrop.__version__
        assert set(machine["versions"]) == {"hookdrop", "torch", "torchvision", "timm"}
        assert machine["cpu"] in text
        assert results["settings"]["shapes"] == SHAPES

    def test_every_contestant_is_timed_and_its_fraction_told(self, speed: tuple[str, dict[str, Any], Path]) -> None:
        _, results, _ = speed
        for shape in SHAPES:
            contestants = results["main"][shape]["contestants"]
            assert list(contestants) == list(peers.contestants())
            for name, numbers in contestants.items():
                spread = numbers["over_limit"]
                assert 0 < spread["low"] <= spread["median"] <= spread["high"]
                assert numbers["page_faults_per_call"]["low"] >= 0
                assert (numbers["dropped"] == 0) == (name == peers.LIMIT)
                assert numbers["rounds"][0] == 0
            assert set(contestants[peers.LIMIT]["over_limit"].values()) == {1.0}

    def test_every_threshold_is_judged_by_its_ratio(self, speed: tuple[str, dict[str, Any], Path]) -> None:
        text, results, _ = speed
        for shape in SHAPES:
            judged = results["main"][shape]["demands"]
            assert [(one["over"], one["under"]) for one in judged] == [threshold.pair for threshold in THRESHOLDS]
            for one, threshold in zip(judged, THRESHOLDS, strict=True):
                assert one["must_holds"] == threshold.holds(one["ratio"]["median"], threshold.must)
        for threshold in THRESHOLDS:
            assert " / ".join(threshold.pair) in text
        bare = results["main"][SHAPES[0]]["demands_without_kernel"]
        assert len(bare) == (len(THRESHOLDS) if kernel.available() else 0)

    def test_the_other_parts(self, speed: tuple[str, dict[str, Any], Path]) -> None:
        _, results, _ = speed
        assert list(results["blocks"][peers.BATCH]["ratios"]) == ["7", "13", "21"]
        sizes = list(map(int, results["growth"]))
        assert sizes == sorted(sizes)
        assert 9e3 < sizes[0] < sizes[-1] < 6e4
        assert set(results["steps"]) == {"28x28", "22x21"}
        for of_shape in results["compiled"].values():
            assert of_shape["dropped"] == pytest.approx(peers.P, abs=0.08)

    def test_no_line_of_a_pipe_is_cut_or_coloured(self, speed: tuple[str, dict[str, Any], Path]) -> None:
        text, _, _ = speed
        assert "…" not in text
        assert "\x1b" not in text

    def test_pictures_are_drawn(self, speed: tuple[str, dict[str, Any], Path]) -> None:
        _, _, out = speed
        for name in ("bars.png", "growth.png"):
            assert (out / name).read_bytes().startswith(b"\x89PNG")


def test_a_part_by_itself_without_the_kernel(tmp_path: Path) -> None:
    arguments = (
        "--quick",
        "--rounds",
        "2",
        "--part",
        "main",
        "--out",
        str(tmp_path),
        "--json",
        str(tmp_path / "a.json"),
    )
    text = run("speed.py", *arguments, HOOKDROP_KERNEL="0")
    results = json.loads((tmp_path / "a.json").read_text())
    assert "not built" in text
    assert set(results) == {"machine", "settings", "main"}
    assert not [name for name in results["main"][SHAPES[0]]["contestants"] if name.endswith(peers.NO_KERNEL)]


class TestMemory:
    def test_runs_and_writes(self, tmp_path: Path) -> None:
        text = run("memory.py", "--json", str(tmp_path / "memory.json"))
        results = json.loads((tmp_path / "memory.json").read_text())
        assert "bytes per element" in text
        assert set(results["bytes_per_element"]) == set(peers.contestants())
        assert set(results["by_rate"][peers.BATCH]) == {"0.01", "0.1", "0.3", "0.5"}

    @pytest.mark.parametrize(("name", "bytes_each"), [(peers.LIMIT, 0), (peers.TIMM, 4), (peers.DROPOUT, 1)])
    def test_counts_what_is_known(self, name: str, bytes_each: int) -> None:
        x = torch.randn(8, 16, 28, 28, requires_grad=True)
        assert memory.kept(peers.contestants()[name], x) / x.numel() == pytest.approx(bytes_each, abs=1e-3)

    def test_one_storage_counts_once_and_the_input_never(self) -> None:
        def square(x: torch.Tensor) -> torch.Tensor:
            mask = torch.ones(x.shape)
            return x * x * mask[:] * mask.view_as(x)

        x = torch.randn(4, 5, requires_grad=True)
        assert memory.kept(peers.Contestant("square", square), x) == 4 * x.numel()

    def test_blocks_keep_next_to_nothing(self) -> None:
        x = torch.randn(8, 64, 28, 28, requires_grad=True)
        for name, one in peers.contestants().items():
            if one.drops_blocks:
                assert memory.kept(one, x) / x.numel() <= 0.05, name


class TestPeers:
    def test_without_kernel_ends_with_its_context_also_by_an_error(self) -> None:
        before = kernel.available()
        with pytest.raises(KeyError), peers.without_kernel():
            assert not kernel.available()
            raise KeyError
        assert kernel.available() == before

    def test_hookdrop_drops_p_and_the_gradient_what_was_dropped(self) -> None:
        for name, one in peers.contestants().items():
            if not one.ours:
                continue
            assert peers.dropped(one, (16, 32, 28, 28), 2) == pytest.approx(peers.P, abs=0.025), name
            x = torch.ones(4, 8, 28, 28, requires_grad=True)
            with one.around():
                y = one.call(x)
                y.sum().backward()
            torch.testing.assert_close(x.grad, y.detach(), msg=name)

    @pytest.mark.parametrize("block", [2, 3, 7])
    def test_the_written_out_formula_keeps_shape_and_mean(self, block: int) -> None:
        y = peers.contestants(block=block)[peers.MIGUELVR].call(torch.ones(8, 3, 14, 14))
        assert y.shape == (8, 3, 14, 14)
        assert y.mean().item() == pytest.approx(1.0, abs=1e-5)
        assert torch.equal(y[:, 0], y[:, 2])

    def test_a_job_leaves_no_gradient_behind(self) -> None:
        x, grad = peers.make((2, 3, 14, 14))
        peers.contestants()[peers.BATCH].job(x, grad)()
        assert x.grad is None

    @pytest.mark.parametrize("text", ["2x3", "2x3x4", "2x0x4x4", "axbxcxd"])
    def test_shapes_that_are_none(self, text: str) -> None:
        with pytest.raises(ValueError):
            peers.shape(text)


class TestCost:
    def test_each_round_has_every_job_in_another_order(self) -> None:
        log: list[str] = []
        jobs = {name: (lambda name=name: log.append(name)) for name in "abcdef"}
        samples = cost.measure(jobs, rounds=6)
        assert all(list(of_name.seconds) == list(range(6)) for of_name in samples.values())
        # A job's repeats come one after the other: what is left is the order of the turns.
        turns = [name for i, name in enumerate(log) if i == 0 or log[i - 1] != name]
        assert turns[:6] == list("abcdef")
        assert turns[-6:] != turns[6:12]
        assert gc.isenabled()

    def test_slow_jobs_run_in_every_third_round(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cost, "SLOW", -1.0)
        assert list(cost.measure({"a": lambda: None}, rounds=7)["a"].seconds) == [0, 3, 6]

    def test_ratios_are_formed_within_rounds_that_had_both(self) -> None:
        samples = {"a": Samples({0: 2.0, 3: 9.0}), "b": Samples({0: 1.0, 1: 100.0, 2: 100.0, 3: 3.0})}
        assert cost.ratios(samples, "a", "b") == Spread(2.25, 2.5, 2.75)

    def test_turns_count_as_disturbed_where_a_core_was_often_waited_for(self) -> None:
        calm, busy = Samples({0: 0.1}, {0: 0.0}, {0: 1.0}), Samples({0: 0.1}, {0: 0.0}, {0: 25.0})
        assert cost.disturbed({"a": calm, "b": busy}) == 0.5

    def test_a_spread_of_one_value(self) -> None:
        assert str(Spread.of([1.5])) == "1.50 [1.50, 1.50]"
        assert [cost.digits(value) for value in (0.123, 9.994, 9.996, 99.4, 99.6, 1234)] == [
            *("0.12", "9.99", "10.0", "99.4", "100", "1234")
        ]


class TestDemands:
    @pytest.mark.parametrize(("at_least", "above", "below"), [(True, True, False), (False, False, True)])
    def test_bounds(self, at_least: bool, above: bool, below: bool) -> None:
        threshold = Threshold("a", "b", must=2.0, aim=3.0, at_least=at_least)
        assert threshold.holds(2.0, 2.0)
        assert threshold.holds(2.1, 2.0) == above
        assert threshold.holds(1.9, 2.0) == below

    def test_without_the_kernel_only_hookdrops_name_changes(self) -> None:
        assert THRESHOLDS[0].without_kernel().pair == (peers.TORCHVISION, f"{peers.BATCH}, no kernel")
        assert THRESHOLDS[2].without_kernel().pair == (f"{peers.BATCH}, no kernel", peers.LIMIT)

"""`benchmarks/speed.py`, `train_step.py`, `overhead.py` and `timing.py`. No test depends on a clock."""

import argparse
import gc
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import overhead
import peers
import speed
import timing
import train_step
from hookdrop import Dropout, inject
from hookdrop.accel import native
from hookdrop.core.arguments import number
from hookdrop.core.hook import SiteHook
from speed import PAIRS, saved_bytes
from tests.benchmarks.test_calls import count_calls
from tests.support.models import Small
from tests.support.programs import ROOT
from timing import COUNTS, Quartiles

SHAPES = ["2x4x28x28", "3x2x22x21"]
VIT = "test_vit"


@pytest.mark.filterwarnings("error::hookdrop.HookdropWarning", "ignore")
def test_all_parts_are_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--threads", "1", "--shapes", *SHAPES, "--quick", "--rounds", "2", "--elements", "5e4"]
    assert speed.main([*settings, "--json", str(tmp_path / "results.json")]) == 0
    text, results = capsys.readouterr().out, json.loads((tmp_path / "results.json").read_text())
    machine, names = results["machine"], list(peers.implementations())
    assert (machine["threads"], machine["kernel"]) == (1, native.available())
    assert set(machine["versions"]) >= {"hookdrop", "torch", "torchvision", "timm"}  # another test may import more
    assert results["settings"]["shapes"] == SHAPES
    for shape in SHAPES:
        found = results["main"][shape]
        assert list(found["times"]) == names
        assert list(found["ratios"])[: len(PAIRS)] == [" / ".join(pair) for pair in PAIRS]
        assert len(found["ratios"]) == len(PAIRS) * (2 if native.available() else 1) + len(names) - 1
        assert all(0 < one["low"] <= one["median"] <= one["high"] for one in found["ratios"].values())
    assert len(results["blocks"][SHAPES[-1]]["ratios"]) == 2
    assert list(results["small"]) == ["4x16x7x7", "16x8x7x7", "8x64x7x7", "8x64x14x14"]
    assert list(results["growth"]) == ["4x1x14x14", "4x4x14x14", "4x3x28x28", "4x10x28x28"]
    assert list(results["memory"]) == names
    assert all(part in text for part in (machine["cpu"], "Bytes saved per element", *map(" / ".join, PAIRS)))


@pytest.mark.filterwarnings("ignore:.*covers the whole 5x5 map")
def test_training_steps_have_a_ratio_for_each_variant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At 160 pixels; torchvision rejects the even blocks to which it clamps at some smaller sizes."""
    small = [
        "--resnet",
        "resnet18",
        "--vits",
        VIT,
        "--batch",
        "2",
        "--rounds",
        "1",
        "--threads",
        "1",
        "--pixels",
        "160",
    ]
    assert train_step.main([*small, "--part", "resnet", "vit", "--json", str(tmp_path / "step.json")]) == 0
    found = json.loads((tmp_path / "step.json").read_text())
    for part, model in (("resnet", "resnet18"), ("vit", VIT)):
        assert list(found[part][model]["times"]) == [train_step.CLEAN, *train_step.VARIANTS[part]]
        assert len(found[part][model]["ratios"]) == len(train_step.VARIANTS[part])
    assert "patch_drop_rate" in capsys.readouterr().out


LSTM = "LSTM of 128 units, 16 sequences of 32 steps"


def test_committed_results_have_every_method() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "costs.json").read_text())["methods"]
    assert list(found) == [name for model in train_step.MODELS for name in train_step.VARIANTS[model]]


def test_methods_of_an_lstm_save_at_least_what_a_step_without_saves(tmp_path: Path) -> None:
    out, names = tmp_path / "costs.json", list(train_step.VARIANTS[LSTM])
    arguments = ["--part", "methods", "--rounds", "3", "--threads", "1", "--only", *names, "--json", str(out)]
    assert train_step.main(arguments) == 0
    found = json.loads(out.read_text())["methods"]
    assert list(found) == names
    assert all(cost["model"] == LSTM and cost["memory"] >= 1 and cost["time"] > 0 for cost in found.values())


class TestMemory:
    @pytest.mark.parametrize(("name", "bytes_each"), [(peers.LIMIT, 0), (peers.TIMM, 4), (peers.DROPOUT, 1)])
    def test_saved_bytes_of_known_functions(self, name: str, bytes_each: int) -> None:
        x = torch.randn(8, 16, 28, 28, requires_grad=True)
        assert saved_bytes(name, peers.implementations()[name], x) / x.numel() == pytest.approx(bytes_each, abs=1e-3)

    def test_drop_block_saves_only_the_seeds(self) -> None:
        """Less than 0.02 bytes per element, where a float mask takes 4 and a bool mask 1."""
        x = torch.randn(8, 64, 28, 28, requires_grad=True)
        for name, one in peers.implementations().items():
            if name.removesuffix(peers.NO_KERNEL) in peers.BLOCKS:
                assert saved_bytes(name, one, x) / x.numel() < 0.02, name


def test_hookdrop_drops_p_in_output_and_gradient() -> None:
    for name, one in peers.implementations().items():
        if not name.startswith("hookdrop") or name == peers.DROP_PATH:  # few numbers: its fraction varies
            continue
        assert peers.dropped_fraction(name, one, (16, 32, 28, 28), 2) == pytest.approx(peers.P, abs=0.025), name
        x = torch.ones(4, 8, 28, 28, requires_grad=True)
        with peers.kernel_of(name):
            (y := one(x)).sum().backward()
        torch.testing.assert_close(x.grad, y.detach(), msg=name)


class TestTiming:
    def test_rounds_run_all_jobs_in_random_order(self) -> None:
        log: list[str] = []
        jobs = {name: (lambda name=name: log.append(name)) for name in "abcdef"}
        samples = timing.measure(jobs, rounds=6)
        assert sorted(samples.index) == [(name, turn) for name in "abcdef" for turn in range(6)]
        # Consecutive calls of a job are repeats within one turn.
        turns = [name for i, name in enumerate(log) if i == 0 or log[i - 1] != name]
        assert turns[:6] == list("abcdef")
        assert turns[-6:] != turns[6:12]
        assert gc.isenabled()

    def test_many_context_switches_give_a_warning(self, capsys: pytest.CaptureFixture[str]) -> None:
        samples = pd.DataFrame([(0.1, 0.0, 1.0), (0.1, 0.0, 25.0)], columns=timing.COUNTS)
        timing.warn_if_busy(samples[:1], "calm")
        timing.warn_if_busy(samples, "busy")
        assert capsys.readouterr().out.strip().startswith("warning: busy: other processes preempted 50%")

    def test_quartiles_of_one_value(self) -> None:
        assert str(Quartiles.of([1.5])) == "1.50 [1.50, 1.50]"
        assert [timing.three_digits(value) for value in (0.123, 9.994, 9.996, 99.4, 99.6, 1234)] == [
            *("0.12", "9.99", "10.0", "99.4", "100", "1234")
        ]


def test_every_part_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert overhead.main(["--quick", "--threads", "1", "--json", str(tmp_path / "all.json")]) == 0
    text, results = capsys.readouterr().out, json.loads((tmp_path / "all.json").read_text())
    assert list(results) == ["machine", "settings", *overhead.PARTS]
    assert results["settings"]["rounds"] == 3
    titles = (results[part]["title"] for part in overhead.PARTS)
    for part in (results["machine"]["cpu"], "the numbers are not reliable", *titles):
        assert part in text
    for label, row in (pair for part in overhead.PARTS for pair in results[part]["rows"].items()):
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
    def measure_calls(jobs: Mapping[str, Callable[[], object]], rounds: int, where: str) -> pd.DataFrame:
        """Calls of hookdrop as microseconds, in place of times."""
        for job in jobs.values():
            job()
        counts = [(1e-6 * count_calls(job).total(), 0.0, 0.0) for job in jobs.values()]
        return pd.DataFrame(counts, columns=COUNTS, index=pd.MultiIndex.from_product([jobs, [0]]))

    monkeypatch.setattr(overhead, "measure", measure_calls)
    monkeypatch.setattr(overhead, "CALLS", 7)
    options, call = argparse.Namespace(rounds=1), SiteHook.__call__
    before = overhead.call(options)["rows"]

    def slow(hook: SiteHook, *given: Any) -> object:
        number(1.0, "p", "test")  # a call of the package
        return call(hook, *given)

    monkeypatch.setattr(SiteHook, "__call__", slow)
    after = overhead.call(options)["rows"]
    assert before["another module without a hook"]["values"] == before["an empty function as hook"]["values"] == [0.0]
    for name, row in before.items():
        assert (after[name]["median"] > row["median"]) == name.startswith("hookdrop"), name

"""The demo: a tiny run of all of it, and its parts on cases made by hand."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import ttest_1samp

import hookdrop

pytest.importorskip("timm")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("rich")

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import arms
import curves
import demo
import digits
import paired
import report
import timing
import unchanged
from matplotlib import colors, image

EPOCHS = 2
NAMES = ["none", "Dropout", "Dropout2d", "DropBlock", "DropPath"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Two seeds of two epochs, through worker processes as in earnest."""
    out = tmp_path_factory.mktemp("demo")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = demo.main(f"--seeds 2 --epochs {EPOCHS} --workers 1 --timing 0 --out {out}".split())
    results = json.loads((out / "results.json").read_text())
    return SimpleNamespace(code=code, text=printed.getvalue(), out=out, results=results)


@pytest.fixture
def dropout() -> arms.Arm:
    return next(arm for arm in arms.ARMS if arm.name == "Dropout")


class TestTinyRun:
    def test_ends_well_and_says_where_its_files_are(self, tiny: SimpleNamespace) -> None:
        assert tiny.code == 0
        assert f"Curves: {tiny.out / 'curves.png'}" in tiny.text
        assert f"All numbers: {tiny.out / 'results.json'}" in tiny.text

    def test_results_hold_every_run_and_what_it_ran_with(self, tiny: SimpleNamespace) -> None:
        results = tiny.results
        assert [(run["seed"], run["arm"]) for run in results["runs"]] == [(s, n) for s in (0, 1) for n in NAMES]
        assert results["failures"] == []
        assert results["settings"]["versions"]["torch"] == torch.__version__.partition("+")[0]
        assert results["settings"]["versions"]["hookdrop"] == hookdrop.__version__
        assert [arm["name"] for arm in results["settings"]["arms"]] == NAMES
        assert len(results["differences"]["nll"]) == 4 + 6

    def test_pairs_share_weights_and_batches_and_seeds_do_not(self, tiny: SimpleNamespace) -> None:
        for what in ("weights", "batches"):
            of_seed = [{run[what] for run in tiny.results["runs"] if run["seed"] == seed} for seed in (0, 1)]
            assert [len(hashes) for hashes in of_seed] == [1, 1]
            assert of_seed[0] != of_seed[1]

    def test_masks_made_each_arm_another_run(self, tiny: SimpleNamespace) -> None:
        first = [run for run in tiny.results["runs"] if run["seed"] == 0]
        assert len({run["first_loss"] for run in first}) == 1
        assert len({run["train_loss"][-1] for run in first}) == len(NAMES)

    def test_rate_rises_in_a_line_to_its_target(self, tiny: SimpleNamespace) -> None:
        for run in tiny.results["runs"]:
            target = 0.0 if run["arm"] == "none" else arms.P
            assert run["rates"] == pytest.approx([0.0, target / 2, target])
            assert run["rate_at_end"] == target

    def test_what_is_dropped_is_what_was_asked(self, tiny: SimpleNamespace) -> None:
        of_dropout = [run for run in tiny.results["runs"] if run["arm"] == "Dropout"]
        for run in of_dropout:
            # Steps 0 to 9 of 10, of which step 0 drops nothing and is not measured. Over two million draws.
            assert run["asked"] == pytest.approx(arms.P * 0.5)
            assert run["dropped"] == pytest.approx(run["asked"], abs=0.002)

    def test_table_has_all_columns_and_rows(self, tiny: SimpleNamespace) -> None:
        head, rule, body = tiny.text.partition("Means of 2 paired seeds")[2].partition("─")
        assert len(rule + body.partition("\n")[0]) <= 120
        for column in report.COLUMNS:
            for part in column.split("\n"):
                assert part in head
        rows = [line.split() for line in body.splitlines() if line.split() and line.split()[0] in NAMES]
        assert [row[0] for row in rows[: len(NAMES)]] == NAMES
        assert all(row[-1].endswith("x") and "…" not in "".join(row) for row in rows[: len(NAMES)])

    def test_says_what_held(self, tiny: SimpleNamespace) -> None:
        line = "state_dict, repr and eval output bit-identical with hooks on and after removal: yes (8 of 8 runs)."
        assert line in tiny.text
        assert "the same numbers to the last bit: yes" in tiny.text
        assert tiny.results["promises"] == {"bit_identical": True, "repeatable": True}

    def test_says_what_it_does_not_show(self, tiny: SimpleNamespace) -> None:
        assert "fixed beforehand, not tuned" in tiny.text
        assert "The 20 intervals" in tiny.text
        assert "about 1 of them would still exclude 0" in tiny.text
        assert "Beware: without a regularizer it is only" in tiny.text

    def test_picture_shows_every_arm(self, tiny: SimpleNamespace) -> None:
        pixels = image.imread(tiny.out / "curves.png")[..., :3]
        assert pixels.shape[0] > 600
        assert pixels.shape[1] > 1000
        for name in NAMES:
            color = np.array(colors.to_rgb(curves.STYLES[name][0]))
            assert (np.abs(pixels - color).max(axis=2) < 0.02).sum() > 100, name


class TestPairing:
    def test_rate_zero_is_none_to_the_last_bit(self, dropout: arms.Arm) -> None:
        bare = paired.run(arms.NONE, 0, EPOCHS)
        hooked = paired.run(arms.Arm("none", "Dropout(p=0.0)", dropout.layers), 0, EPOCHS)
        differing = {key for key in bare if bare[key] != hooked[key]}
        assert differing <= {"sites", "changes", "seconds"}
        assert hooked["sites"] == 4

    def test_a_seed_fixes_a_run(self, dropout: arms.Arm) -> None:
        first, again, other = (paired.run(dropout, seed, 1) for seed in (0, 0, 1))
        assert paired.same_numbers(first, again)
        assert not paired.same_numbers(first, other)

    @pytest.mark.parametrize("what", ["weights", "batches", "first_loss"])
    def test_runs_that_are_no_pair_are_an_error(self, what: str) -> None:
        run = {"arm": "none", "seed": 3, "weights": "w", "batches": "b", "first_loss": 2.3}
        paired.check_pairs([run, run | {"arm": "Dropout"}, run | {"seed": 4, what: 0}])
        with pytest.raises(RuntimeError, match=f"Dropout and none of seed 3 are no pair: {what}"):
            paired.check_pairs([run, run | {"arm": "Dropout", what: 0}])

    def test_a_loss_that_is_not_a_number_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(digits, "OPTIMIZER", {"lr": 1e30})
        with pytest.raises(FloatingPointError, match="not a finite number"):
            paired.run(arms.NONE, 0, EPOCHS)


class TestTask:
    def test_training_set_is_ten_of_each_class_and_none_of_the_test_set(self) -> None:
        task = digits.load()
        chosen = digits.training_set(5)
        assert task.y_N[chosen].bincount().tolist() == [10] * 10
        assert len(set(chosen.tolist())) == 100
        assert not set(chosen.tolist()) & set(task.test.tolist())
        assert len(task.test) == 797

    def test_batch_order_does_not_depend_on_the_global_generator(self) -> None:
        torch.manual_seed(0)
        first = [batch.tolist() for (batch,) in digits.make_loader(2)]
        torch.manual_seed(1)
        assert [batch.tolist() for (batch,) in digits.make_loader(2)] == first
        assert [batch.tolist() for (batch,) in digits.make_loader(3)] != first


class TestArms:
    def test_blocks_are_smaller_than_the_maps(self) -> None:
        arm = next(arm for arm in arms.ARMS if arm.name == "DropBlock")
        planned = arm.plan(digits.make_model(), steps=10)
        assert all(min(site.shape[2:]) > 2 * arms.BLOCK for site in planned.sites)
        assert planned.warnings == []

    def test_a_block_as_large_as_the_map_is_an_error(self, dropout: arms.Arm) -> None:
        model = digits.make_model()
        arm = arms.Arm("DropBlock", "DropBlock(p=0.1, block_size=9)", dropout.layers)
        with pytest.raises(RuntimeError, match="covers the whole 8x8 map"):
            arm.inject(model, digits.make_optimizer(model), steps=10)

    def test_drop_path_drops_the_branch_and_not_the_shortcut(self) -> None:
        arm = next(arm for arm in arms.ARMS if arm.name == "DropPath")
        model = digits.make_model().eval()
        drop = arm.plan(model, steps=10).apply()
        blocks = [block for stage in ("layer1", "layer2", "layer3", "layer4") for block in model.get_submodule(stage)]
        assert len(drop.sites) == len(blocks)
        for block in blocks:
            torch.nn.init.ones_(block.bn2.weight)
            x = torch.randn(2, block.conv1.in_channels, 8, 8)
            shortcut = x if block.downsample is None else block.downsample(x)
            with drop.sampling(p=1.0):
                assert torch.equal(block(x), block.act2(shortcut))
            assert not torch.equal(block(x), block.act2(shortcut))


class TestUnchanged:
    @pytest.fixture
    def hooked(self) -> Iterator[tuple[torch.nn.Module, hookdrop.Injection, torch.Tensor, Any]]:
        model = digits.make_model()
        before = unchanged.face(model)
        drop = hookdrop.inject(model, hookdrop.Dropout(p=0.5), layers="bn1")
        model.train()(digits.test_images()[:4])
        return model, drop, digits.test_images()[:4], before

    def test_finds_nothing_where_nothing_is(self, hooked: Any) -> None:
        assert unchanged.changes(*hooked) == []
        assert len(hookdrop.find(hooked[0])) == 0

    def test_names_an_eval_output_that_differs(self, hooked: Any) -> None:
        with hooked[1].sampling():
            found = unchanged.changes(*hooked)
        assert found == ["eval output with hooks hidden", "eval output with hooks removed"]

    def test_names_a_state_dict_that_differs(self, hooked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        model, drop = hooked[:2]
        monkeypatch.setattr(type(drop), "remove", lambda self: model.fc.weight.data.add_(1))
        found = unchanged.changes(*hooked)
        assert "state_dict with hooks removed" in found
        assert "hook dictionaries after removal" in found

    def test_names_a_face_that_differs(self, hooked: Any) -> None:
        model, drop, x, before = hooked
        found = unchanged.changes(model, drop, x, (*before[:2], ["another key"]))
        assert found == ["class, repr or state_dict keys of the model that came in"]


def made(low: float, high: float) -> report.Interval:
    return report.Interval((low + high) / 2, low, high)


class TestWords:
    def test_interval_is_the_paired_t_interval(self) -> None:
        values = [0.3, -1.0, 2.5, 0.75]
        ours = report.Interval.of(values)
        theirs = ttest_1samp(values, 0).confidence_interval(0.95)
        assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high))
        assert ours.mean == pytest.approx(np.mean(values))

    def test_differences_are_of_the_same_seed(self) -> None:
        runs = [
            {"arm": "none", "seed": 0, "accuracy": 90.0},
            {"arm": "A", "seed": 1, "accuracy": 81.0},
            {"arm": "A", "seed": 0, "accuracy": 91.0},
            {"arm": "none", "seed": 1, "accuracy": 80.0},
        ]
        assert report.intervals_of(report.by_arm(runs), "accuracy") == {("A", "none"): made(1.0, 1.0)}

    def test_above_below_and_neither(self) -> None:
        intervals = {
            ("A", "none"): made(0.5, 2.5),
            ("B", "none"): made(-2.0, -1.0),
            ("C", "none"): made(-1.0, 1.0),
            ("D", "none"): made(0.0, 1.0),
            ("A", "B"): made(1.0, 3.0),
            ("A", "C"): made(-1.0, 3.0),
            ("B", "D"): made(-4.0, -2.0),
        }
        assert report.in_words("accuracy", intervals) == (
            "Accuracy: A is above none; B is below none; C and D cannot be distinguished from none.\n"
            "  Among the regularizers, A is above B (+2.00 [+1.00, +3.00]) and B is below D (-3.00 [-4.00, -2.00]); "
            "the other 1 of 3 pairs cannot be distinguished."
        )

    def test_nothing_can_be_distinguished(self) -> None:
        intervals = {("A", "none"): made(-1, 1), ("B", "none"): made(-1, 1), ("A", "B"): made(-2, 1)}
        assert report.in_words("nll", intervals) == (
            "NLL (lower is better): A and B cannot be distinguished from none.\n"
            "  The regularizers cannot be distinguished from one another."
        )

    def test_all_can_be_distinguished(self) -> None:
        intervals = {("A", "none"): made(-2, -1), ("B", "none"): made(-4, -3), ("A", "B"): made(1, 3)}
        assert report.in_words("nll", intervals) == (
            "NLL (lower is better): A and B are below none.\n"
            "  Among the regularizers, A is above B (+2.000 [+1.000, +3.000])."
        )


class TestTiming:
    def test_ratios_are_to_none_of_the_same_round(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = iter([1.0, 1.0, *(1.0, 2.0), *(2.0, 3.0), *(4.0, 10.0)])
        monkeypatch.setattr(timing, "_time", lambda trainee: next(clock))
        monkeypatch.setattr(timing, "_at_final_rate", lambda arm: arm)
        assert timing.ratios([arms.NONE, arms.ARMS[1]], 0) == {"none": [1.0, 1.0, 1.0], "Dropout": [2.0, 1.5, 2.5]}

    def test_times_are_at_the_final_rate(self, dropout: arms.Arm) -> None:
        assert timing._at_final_rate(dropout).rate == arms.P


class TestFailures:
    """A stub in threads stands for the runs in processes."""

    @pytest.fixture
    def outcome(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        special: dict[tuple[str, int], Any] = {}

        def run(arm: arms.Arm, seed: int, epochs: int) -> dict[str, Any]:
            if isinstance(what := special.get((arm.name, seed)), Exception):
                raise what
            numbers = {"train_loss": [1.0], "rates": [0.0, 0.1], "curve": [(1, 90.0, 0.3)], "first_loss": 1.0}
            numbers |= {"accuracy": 90.0 + seed, "nll": 0.3, "asked": 0.1, "dropped": 0.1, "rate_at_end": 0.1}
            hashes = {"weights": str(seed), "batches": str(seed), "sites": 4, "seconds": 1.0}
            changes = [] if arm.regularizer else None
            return {"arm": arm.name, "seed": seed, "changes": changes, **numbers, **hashes} | (what or {})

        monkeypatch.setattr(paired, "run", run)
        monkeypatch.setattr(timing, "ratios", lambda arms, seconds: {arm.name: [1.0, 1.0] for arm in arms})
        monkeypatch.setattr(demo, "ProcessPoolExecutor", lambda count, context, initializer: ThreadPoolExecutor(count))
        return special

    def go(self, out: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, dict[str, Any]]:
        code = demo.main(["--seeds", "2", "--epochs", "1", "--workers", "1", "--out", str(out)])
        return code, capsys.readouterr().out, json.loads((out / "results.json").read_text())

    def test_all_well(self, outcome: dict[Any, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        code, text, _ = self.go(tmp_path, capsys)
        assert code == 0
        assert "FAILED" not in text
        assert "Beware" not in text

    def test_a_failed_run(self, outcome: dict[Any, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        outcome["DropPath", 1] = FloatingPointError("nan")
        code, text, results = self.go(tmp_path, capsys)
        assert code == 1
        assert "FAILED: DropPath, seed 1: FloatingPointError: nan" in text
        assert results["failures"] == ["DropPath, seed 1: FloatingPointError: nan"]
        assert len(results["runs"]) == 9
        assert "cannot be distinguished" not in text

    def test_a_model_that_was_changed(
        self, outcome: dict[Any, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        outcome["Dropout", 1] = {"changes": ["eval output with hooks hidden"]}
        code, text, results = self.go(tmp_path, capsys)
        assert code == 1
        assert "after removal: NO (7 of 8 runs)" in text
        assert "Dropout, seed 1: eval output with hooks hidden" in text
        assert not results["promises"]["bit_identical"]

    def test_runs_that_are_no_pair_leave_their_numbers(
        self, outcome: dict[Any, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        outcome["Dropout", 1] = {"batches": "others"}
        with pytest.raises(RuntimeError, match="are no pair: batches"):
            self.go(tmp_path, capsys)
        assert len(json.loads((tmp_path / "results.json").read_text())["runs"]) == 10

    def test_options_out_of_range(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            demo.main(["--seeds", "1"])
        assert "--seeds must be at least 2" in capsys.readouterr().err

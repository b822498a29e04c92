"""Summaries: pairs, excluded runs, controls, and the sentences of the report."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from comparison.analysis.inference import holm
from comparison.analysis.schema import METRICS, ArmSummary, Cell, Difference, Spread, Summary
from comparison.analysis.summary import summarize
from comparison.analysis.text import sentences, verdict
from comparison.run import metrics
from comparison.run.record import Failure, Outcome, Record
from comparison.spec.run_spec import Arm, Data, Model, Run
from comparison.spec.study import Entry

IMAGES = 400
NONE = Arm(name="none", kind="none")
A = Arm(name="DropBlock", call="DropBlock(p=0.1, block_size=3)", p=0.1, layers=("layer1.*",))
B = Arm(name="DropPath", call="DropPath(p=0.1)", p=0.1, layers=("layer2.*",))
AA = Arm(name="DropBlock (p = 0)", call="DropBlock(p=0.1, block_size=3)", p=0.0, layers=("layer1.*",))
OTHER = Arm(name="none (other seeds)", kind="none")
HEAD = {"title": "Test", "created": "2026-01-01T00:00:00+00:00", "command": "compare.py", "config": "", "seeds": 8}
COST = (Spread(low=1.0, median=1.25, high=1.5), Spread(low=1.0, median=1.0, high=1.0))


def run_of(arm: Arm, seed: int, stage: Literal["tuning", "final"] = "final") -> Run:
    return Run(stage=stage, data=Data(name="digits"), model=Model(name="resnet18"), arm=arm, epochs=2, seed=seed)


def record_of(run: Run, shift: float = 0.0, **changed: Any) -> Record:
    """A finished run; `shift` increases the fraction of correct images."""
    order = np.random.default_rng((run.seed, 7))
    right = order.random(IMAGES)  # the same for all arms of a seed, because they are pairs
    own = np.random.default_rng((run.seed, *map(ord, run.arm.name)))
    correct = right < 0.8 + shift + 0.004 * own.normal()
    confidence = np.clip(0.5 + 0.5 * order.random(IMAGES) + 0.002 * own.normal(), 0, 1).astype(np.float32)
    nll = np.where(correct, 0.1, 2.0).astype(np.float32)
    active = run.arm.p is not None and run.arm.p > 0
    outcome = Outcome(
        call=run.arm.call,
        sites=2 if run.arm.call else 0,
        flags=["a block covers its map"] if run.arm.name == "DropBlock" else [],
        weights_before=f"before {run.seed}",
        weights_after=f"after {run.seed}{run.arm.name if active else ''}",
        batches=[f"epoch {run.seed}.{epoch}" for epoch in (1, 2)],
        first_loss=2.3,
        train_loss=[1.0, 0.5 + 0.1 * run.seed],
        rate_at_end=run.arm.p,
        asked=0.1 if active else None,
        dropped=0.1 + 0.001 * run.seed if active else None,
        changes=[] if run.arm.call else None,
        accuracy=100 * float(correct.mean()),
        nll=float(nll.mean()),
        ece=metrics.ece(confidence, correct),
        outputs=f"outputs {run.seed}{run.arm.name if active else ''}",
        data="",
        test_sets=[],
        steps=20,
        train_images=200,
        scored_images=IMAGES,
    )
    outcome.update(changed)  # type: ignore[typeddict-item]
    images = {"correct": correct, "confidence": confidence, "nll": nll, "label": np.arange(IMAGES) % 8 // 3}
    spec = run.model_dump(mode="json")
    return Record(run.key, spec, outcome, images, environment={"torch": "2", "git": {"dirty": False}}, seconds=1.5)


@dataclass
class Made:
    """A comparison that tests can modify."""

    entries: list[Entry]
    records: dict[str, Record] = field(default_factory=dict)

    def record(self, name: str, seed: int) -> Record:
        return self.records[next(entry for entry in self.entries if entry.arm.name == name).runs[seed].key]

    def change(self, name: str, seed: int, **changed: Any) -> None:
        record = self.record(name, seed)
        assert record.outcome
        self.records[record.key] = replace(record, outcome={**record.outcome, **changed})  # type: ignore[typeddict-item]

    def fail(self, name: str, seed: int, kind: Any = "nan", message: str = "the loss is nan") -> None:
        record = self.record(name, seed)
        self.records[record.key] = replace(record, outcome=None, images={}, failure=Failure(kind, message))

    def summary(self) -> Summary:
        return summarize(self.entries, self.records, {(self.entries[0].cell, "DropBlock"): COST}, **HEAD)

    def cell(self) -> Cell:
        return self.summary().cells[0]


def make(seeds: Sequence[int] = range(8)) -> Made:
    arms: Sequence[tuple[Arm, Any]] = ((A, ""), (OTHER, "seeds"), (NONE, ""), (AA, "aa"), (B, ""))
    made = Made([])
    for arm, control in arms:
        runs = {s: run_of(NONE, 100 + s) if control == "seeds" else run_of(arm, s) for s in seeds}
        made.entries.append(Entry(run_of(NONE, 0).cell, arm, runs, control))
        for run in runs.values():
            record = record_of(run)
            if control == "aa":
                bare = record_of(run_of(NONE, run.seed))
                assert bare.outcome
                record = replace(record, outcome={**bare.outcome, "changes": []}, images=bare.images)
            made.records[run.key] = record
    return made


@pytest.fixture
def made() -> Made:
    return make()


def arm_of(cell: Cell, name: str) -> ArmSummary:
    return next(arm for arm in cell.arms if arm.name == name)


def against(cell: Cell, name: str, metric: Any = "accuracy") -> Difference:
    found = arm_of(cell, name).against_none
    assert found
    return found[metric]


def test_runs_that_learned_nothing_come_first(made: Made) -> None:
    """Three of the eight labels in a row are of the most frequent class."""
    assert made.cell().chance == 37.5
    assert words(made.cell())[0] == verdict(made.cell())
    for seed in range(8):
        made.change("none", seed, train_loss=[2.3, 2.2], accuracy=41.0)
    chance, hardly, *_ = words(made.cell())
    assert chance.startswith(
        "At the level of chance: 1 of 5 variants (none: 41.0 %). Always answering the most frequent"
    )
    assert hardly.startswith("Hardly trained: the training loss of “none” went from 2.30 to 2.20 in 20 steps.")


def words(cell: Cell) -> list[str]:
    return [*sentences(cell, "cautions"), verdict(cell), *sentences(cell, "notes", "controls")]


def said(cell: Cell, start: str) -> str:
    (sentence,) = [sentence for sentence in words(cell) if sentence.startswith(start)]
    return sentence


class TestSummary:
    def test_holm_families_are_the_arms_and_the_pairs_of_a_metric(self, made: Made) -> None:
        third = A.model_copy(update={"name": "Dropout"})
        runs = {seed: run_of(third, seed) for seed in range(8)}
        made.records |= {run.key: record_of(run, 0.1) for run in runs.values()}
        made.entries.append(Entry(made.entries[0].cell, third, runs))
        cell = made.cell()
        families = [[against(cell, name) for name in ("DropBlock", "DropPath", "Dropout")]]
        families += [[pair.difference for pair in cell.between if pair.metric == metric] for metric in METRICS]
        for family in families:
            assert [one.p_holm for one in family] == holm([one.p for one in family])
            assert len(family) == 3
        assert against(cell, "none (other seeds)").p_holm == against(cell, "none (other seeds)").p

    def test_arm_summary_averages_its_runs(self, made: Made) -> None:
        cell = made.cell()
        block, names = arm_of(cell, "DropBlock"), ["none", "DropBlock", "DropPath", "none (other seeds)"]
        assert [arm.name for arm in cell.arms] == [*names, "DropBlock (p = 0)"]
        dropped = [0.1 + 0.001 * seed for seed in range(8)]
        interval = ttest_1samp(dropped, 0).confidence_interval(0.95)
        assert block.dropped == pytest.approx(np.mean(dropped))
        assert block.dropped_half == pytest.approx((interval.high - interval.low) / 2)
        assert (block.call, block.sites, block.layers) == ("DropBlock(p=0.1, block_size=3)", 2, ["layer1.*"])
        assert (block.asked, block.rate_at_end) == (pytest.approx(0.1), pytest.approx(0.1))
        assert block.flags == ["a block covers its map"]
        assert (block.time, block.memory) == COST

    def test_no_finished_runs(self, made: Made) -> None:
        made.records.clear()
        cell = made.cell()
        assert all(arm.runs == 0 and arm.against_none is None for arm in cell.arms)
        assert cell.between == []
        assert verdict(cell) == "No variant has a finished pair of runs: nothing can be said yet."
        assert said(cell, "Not finished: 32 pairs missing.")
        assert sum(sentence.endswith("? not measured.") for sentence in words(cell)) == 3


class TestTestSets:
    @pytest.fixture
    def split(self, made: Made) -> Made:
        sets = (np.arange(IMAGES) >= 100).astype(np.int64)
        for key, record in made.records.items():
            outcome: Any = {**(record.outcome or {}), "test_sets": ["near", "far"]}
            made.records[key] = replace(record, outcome=outcome, images={**record.images, "test_set": sets})
        return made

    def test_each_test_set_has_its_own_cell_with_the_metrics_of_its_images(self, split: Made) -> None:
        near, far = split.summary().cells
        assert [cell.title[-5:-1] for cell in (near, far)] == ["near", " far"]
        for cell, chosen in ((near, slice(None, 100)), (far, slice(100, None))):
            images = {name: values[chosen] for name, values in split.record("DropBlock", 2).images.items()}
            assert cell.test_images == len(images["correct"])
            assert {metric: found[2] for metric, found in arm_of(cell, "DropBlock").values.items()} == {
                "accuracy": pytest.approx(100 * images["correct"].mean()),
                "nll": pytest.approx(images["nll"].mean()),
                "ece": pytest.approx(metrics.ece(images["confidence"], images["correct"])),
            }


class TestExcludedPairs:
    def test_a_failed_run_excludes_only_its_pair(self, made: Made) -> None:
        made.fail("DropBlock", 3, "killed", "out of memory\n  where it was")
        summary = made.summary()
        cell = summary.cells[0]
        assert arm_of(cell, "DropBlock").set_aside == {3: "killed: out of memory"}
        assert against(cell, "DropBlock").seeds == cell.between[0].difference.seeds == [0, 1, 2, 4, 5, 6, 7]
        assert against(cell, "DropPath").seeds == list(range(8))
        assert said(cell, "Excluded: 1 pair;")
        assert ([found.runs for found in summary.environments], summary.seconds) == ([40], 40 * 1.5)
        (failure,) = summary.failures
        assert (failure.arm, failure.seed, failure.stage, failure.kind) == ("DropBlock", 3, "final", "killed")
        assert (failure.message, failure.key) == ("out of memory\n  where it was", made.record("DropBlock", 3).key)

    def test_a_failed_baseline_run_excludes_the_pairs_of_all_arms(self, made: Made) -> None:
        made.fail("none", 2)
        cell = made.cell()
        for arm in cell.arms[1:]:
            assert arm.set_aside == {2: "none: nan: the loss is nan"}
            assert 2 not in against(cell, arm.name).seeds
        assert 2 not in cell.between[0].difference.seeds
        assert said(cell, "Excluded: 4 pairs")

    def test_a_nan_metric_excludes_the_run(self, made: Made) -> None:
        made.change("DropPath", 1, nll=float("nan"))
        found = arm_of(made.cell(), "DropPath")
        assert found.set_aside == {1: "nan: a metric is not finite"}
        assert 1 not in found.seeds

    def test_missing_runs_are_listed_and_the_summary_is_marked_unfinished(self, made: Made) -> None:
        for seed in (6, 7):
            del made.records[made.record("DropPath", seed).key]
        cell = made.cell()
        assert arm_of(cell, "DropPath").set_aside == {6: "not run", 7: "not run"}
        assert words(cell)[0].startswith("Not finished: 2 pairs missing.")
        assert made.summary().failures == []

    @pytest.mark.parametrize("what", [{"weights_before": "others"}, {"batches": ["others"]}])
    def test_mismatched_runs_are_excluded_with_a_warning(self, made: Made, what: dict[str, Any]) -> None:
        assert made.cell().controls.paired
        made.change("DropBlock", 1, **what)
        cell = made.cell()
        assert not cell.controls.paired
        assert arm_of(cell, "DropBlock").set_aside == {1: "no pair: initial weights or batches differ from none"}
        assert said(cell, "Warning: Did all variants of a seed have the same").endswith("? no.")


class TestControls:
    def test_valid_controls(self, made: Made) -> None:
        cell = made.cell()
        controls = cell.controls
        assert (controls.aa_equal, controls.aa_seeds, controls.unchanged, controls.hooked) == (8, 8, 24, 24)
        assert controls.hold
        assert controls.none_none["accuracy"].seeds == list(range(8))
        answers = [one.partition("? ")[2] for one in words(cell) if one.startswith("Control: ")]
        assert answers == ["yes (8 of 8 seeds).", "yes.", "yes.", "yes (24 of 24 runs)."]

    @pytest.mark.parametrize(
        ("name", "what", "said_by"),
        [
            ("DropBlock (p = 0)", "weights_after", ("Is the variant with p = 0", "no (7 of 8 seeds).")),
            ("DropBlock (p = 0)", "outputs", ("Is the variant with p = 0", "no (7 of 8 seeds).")),
            ("DropPath", "changes", ("Were state_dict", "no (23 of 24 runs).")),
        ],
    )
    def test_changes_are_detected(self, made: Made, name: str, what: str, said_by: tuple[str, str]) -> None:
        made.change(name, 4, **{what: ["other"]})
        cell = made.cell()
        assert not cell.controls.hold
        assert said(cell, f"Warning: {said_by[0]}").endswith(said_by[1])

    def test_other_seeds_control_is_not_a_mismatch_and_reports_its_interval(self, made: Made) -> None:
        assert arm_of(made.cell(), "none (other seeds)").set_aside == {}
        for seed in range(8):
            none, other = made.record("none", seed), made.record("none (other seeds)", seed)
            assert none.outcome
            made.change("none (other seeds)", seed, accuracy=none.outcome["accuracy"] + 5 + seed / 10)
            made.records[other.key] = replace(made.records[other.key], images=none.images)
        sentence = said(made.cell(), "Warning: Is the difference between none with other seeds")
        assert "0 is outside the 95 % interval of Accuracy +5.35 [" in sentence

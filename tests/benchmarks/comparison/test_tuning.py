"""Tuning: the same budget for every arm, only on validation images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pydantic")
pytest.importorskip("optuna")
pytest.importorskip("timm")
pytest.importorskip("torchvision")
pytest.importorskip("yaml")
from comparison.engines.base import Job
from comparison.engines.runner import Runner
from comparison.engines.store import Store
from comparison.run.record import Failure, Record
from comparison.spec.arms import is_identity_at_0
from comparison.spec.config import NONE, validate
from comparison.spec.run_spec import Arm, Data, Model, Run
from comparison.spec.search import FIRST_SEED, Search, tune, with_settings
from comparison.spec.study import OTHER_SEEDS, Study
from comparison.spec.tuning import TuningConfig
from comparison.spec.yaml_lines import Lines

GRID = TuningConfig(
    space={"p": [0.1, 0.2, 0.3], "weight_decay": [0.05]}, space_none={"weight_decay": [0.01, 0.05, 0.2]}
)


DROPPING = Arm(name="Dropout", call="Dropout()", p=0.5, layers=("x",))


def run_of(arm: Arm) -> Run:
    return Run(data=Data(name="digits"), model=Model(name="x"), arm=arm, epochs=1, seed=0)


class Oracle:
    """Scores runs with a minimal NLL at p = 0.2 and at weight decay 0.01."""

    def __init__(self, failing: float | None = None) -> None:
        self.demanded: list[list[Run]] = []
        self.failing = failing

    def __call__(self, runs: Sequence[Run]) -> Mapping[str, float | None]:
        self.demanded.append(list(runs))
        return {run.key: self.nll(run) for run in runs}

    def nll(self, run: Run) -> float | None:
        if self.failing is not None and run.arm.p == self.failing:
            return None
        nll = run.optimizer.weight_decay if run.arm.p is None else abs(run.arm.p - 0.2)
        return nll + run.seed % 2


class TestFairness:
    def test_every_arm_including_none_gets_the_same_number_of_runs(self) -> None:
        oracle = Oracle()
        tune([Search(GRID, run_of(NONE)), Search(GRID, run_of(DROPPING))], oracle)
        runs = [run for runs in oracle.demanded for run in runs]
        assert [sum(run.arm.name == name for run in runs) for name in ("none", "Dropout")] == [6, 6]

    def test_tuning_runs_have_their_own_stage_and_seeds(self) -> None:
        oracle = Oracle()
        tune([Search(GRID, run_of(DROPPING))], oracle)
        runs = [run for runs in oracle.demanded for run in runs]
        assert {run.stage for run in runs} == {"tuning"}
        assert {run.seed for run in runs} == {FIRST_SEED, FIRST_SEED + 1}

    def test_a_grid_takes_one_round_and_tpe_one_per_trial(self) -> None:
        learning = TuningConfig(
            method="tpe", trials=3, space={"p": [0.05, 0.5], "lr": [0.001, 0.1]}, space_none={"lr": [0.001, 0.1]}
        )
        for config, sizes in ((GRID, [12]), (learning, [4, 4, 4])):
            oracle = Oracle()
            tune([Search(config, run_of(NONE)), Search(config, run_of(DROPPING))], oracle)
            assert [len(runs) for runs in oracle.demanded] == sizes


class TestResults:
    def test_the_lowest_mean_nll_is_chosen_and_edges_are_reported(self) -> None:
        none, dropping = tune([Search(GRID, run_of(NONE)), Search(GRID, run_of(DROPPING))], Oracle())
        assert (dropping.chosen, dropping.at_edge) == ({"p": 0.2, "weight_decay": 0.05}, [])
        assert (none.chosen, none.at_edge) == ({"weight_decay": 0.01}, ["weight_decay"])
        assert [trial.settings["p"] for trial in dropping.trials] == [0.1, 0.2, 0.3]
        assert [trial.score for trial in dropping.trials] == pytest.approx([0.6, 0.5, 0.6])

    def test_a_trial_with_a_failed_run_is_not_chosen(self) -> None:
        (found,) = tune([Search(GRID, run_of(DROPPING))], Oracle(failing=0.2))
        assert [trial.score is None for trial in found.trials] == [False, True, False]
        assert found.chosen["p"] in (0.1, 0.3)

    @pytest.mark.parametrize("method", ["random", "tpe"])
    def test_searches_are_deterministic(self, method: Any) -> None:
        config = TuningConfig(
            method=method, trials=12, space={"p": [0.05, 0.5], "lr": [0.001, 0.1]}, space_none={"lr": [0.001, 0.1]}
        )
        first, second = (tune([Search(config, run_of(DROPPING))], Oracle())[0] for _ in range(2))
        assert first == second
        assert len(first.trials) == 12
        assert all(0.05 <= trial.settings["p"] <= 0.5 for trial in first.trials)
        assert first.chosen["p"] == pytest.approx(0.2, abs=0.06)

    def test_tuned_settings_are_applied_to_the_run(self) -> None:
        run = with_settings(run_of(DROPPING), {"p": 0.3, "lr": 0.5, "weight_decay": 0.0, "label_smoothing": 0.1})
        assert (run.arm.p, run.optimizer.lr, run.optimizer.weight_decay, run.label_smoothing) == (0.3, 0.5, 0.0, 0.1)


class TestRunner:
    def test_failed_runs_have_no_score(self, tmp_path: Path) -> None:
        """The second of three trials fails; a failed run has no score."""

        class Engine:
            def run(self, runs: Sequence[Run], job: Job, store: Store, scratch: Path) -> Iterator[Record]:
                for run in runs:
                    outcome: Any = {"nll": Oracle().nll(run)}
                    failed = Record(run.key, {}, failure=Failure("nan", "the loss is nan"))
                    record = failed if run.arm.p == 0.2 else Record(run.key, {}, outcome=outcome)
                    store.add(record)
                    yield record

        with Store(tmp_path / "runs") as store:
            trainer = Runner(store, Engine(), tmp_path, lambda total, title: nullcontext(lambda record: None))
            (found,) = trainer.tune({("cell", "Dropout"): Search(GRID, run_of(DROPPING))}).values()
        assert [trial.score for trial in found.trials] == [pytest.approx(0.6), None, pytest.approx(0.6)]
        assert found.chosen["p"] in (0.1, 0.3)


class TestStudy:
    def study(self, only: Sequence[str] = ()) -> Study:
        settings = {
            "models": "resnet10t",
            "data": "digits",
            "layers": "layer*.*.bn2",
            "epochs": 1,
            "seeds": 3,
            "arms": [
                "Dropout(p=0.1)",
                {"recipe": "dropblock_resnet(p=0.1)"},
                {"peer": "timm.DropBlock2d(drop_prob=0.1)", "like": "Dropout"},
            ],
            "tuning": GRID.model_dump(),
        }
        return Study(validate(settings, Lines("here")), only)

    def test_peers_use_the_tuned_settings_of_their_counterparts(self) -> None:
        study = self.study()
        searches = study.searches()
        assert [name for _, name in searches] == ["none", "Dropout", "dropblock_resnet"]
        tunings = dict(zip(searches, tune(list(searches.values()), Oracle()), strict=True))
        entries = {entry.arm.name: entry for entry in study.entries(tunings)}
        assert entries["timm.DropBlock2d (equal p)"].arm.p == entries["Dropout"].arm.p == 0.2
        assert entries["timm.DropBlock2d (equal p)"].tuning is None
        assert entries["timm.DropBlock2d (equal p)"].like == "Dropout"
        assert entries["Dropout"].tuning is not None

    def test_every_comparison_has_controls(self) -> None:
        entries = {entry.control: entry for entry in self.study().entries({}) if entry.control}
        still, seeds = entries["aa"], entries["seeds"]
        assert (still.arm.p, still.arm.call, list(still.runs)) == (0.0, "Dropout()", [0, 1, 2])
        assert [run.seed for run in seeds.runs.values()] == [OTHER_SEEDS + i for i in range(3)]
        assert {run.arm.kind for run in seeds.runs.values()} == {"none"}

    def test_a_linear_probe_is_a_tuned_reference_outside_of_holms_correction(self) -> None:
        settings = self.study().config.model_dump() | {"arms": [{"probe": 0.1}, "Dropout(p=0.1)"]}
        study = Study(validate(settings, Lines("here")))
        assert [name for _, name in study.searches()] == ["none", "linear probe", "Dropout"]
        entries = {entry.arm.name: entry.control for entry in study.entries({})}
        assert entries["linear probe"] == "reference"
        assert [name for name, control in entries.items() if control == "aa"] == ["p = 0 (A/A)"]

    def test_the_aa_control_is_an_identity_at_rate_0(self) -> None:
        """`ScaleActivationGrad` is the identity at 1, and stops all gradients at 0."""
        study = self.study()
        scaling = [Arm(name="s", call="ScaleActivationGrad()", p=0.5, layers=("x",)), *study.arms[1:]]
        assert [is_identity_at_0(arm) for arm in scaling] == [False, True, True, True]
        assert not is_identity_at_0(NONE)

    def test_no_two_arms_share_a_run(self) -> None:
        keys = [run.key for entry in self.study().entries({}) for run in entry.runs.values()]
        assert len(set(keys)) == len(keys) == 6 * 3

    def test_selected_arms_have_the_same_runs(self) -> None:
        everything = {entry.arm.name: entry for entry in self.study().entries({})}
        for entry in self.study(["dropblock_resnet"]).entries({}):
            if entry.control != "aa":
                assert entry.runs == everything[entry.arm.name].runs

    def test_selecting_a_peer_tunes_its_counterpart(self) -> None:
        assert [name for _, name in self.study(["timm.DropBlock2d (equal p)"]).searches()] == ["none", "Dropout"]

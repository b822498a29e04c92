"""Tuning: the same budget for every arm, only on validation images; and the runs of a study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from comparison.spec.arms import is_identity_at_0
from comparison.spec.config import NONE, validate
from comparison.spec.run_spec import Arm, Data, Model, Run
from comparison.spec.study import OTHER_SEEDS, Study
from comparison.spec.tuning import FIRST_SEED, Search, Tuning, TuningConfig, with_settings

GRID = TuningConfig(
    space={"p": [0.1, 0.2, 0.3], "weight_decay": [0.05]}, space_none={"weight_decay": [0.01, 0.05, 0.2]}
)
DROPPING = Arm(name="Dropout", call="Dropout(p=0.5)", p=0.5, layers=("x",))


def search_of(arm: Arm) -> Search:
    return Search(GRID, Run(data=Data(name="digits"), model=Model(name="x"), arm=arm, epochs=1, seed=0))


def nll(run: Run, failing: float | None = None) -> float | None:
    """A minimal NLL at p = 0.2 and at weight decay 0.01."""
    if failing is not None and run.arm.p == failing:
        return None
    return (run.optimizer.weight_decay if run.arm.p is None else abs(run.arm.p - 0.2)) + run.seed % 2


def result(search: Search, failing: float | None = None) -> Tuning:
    return search.result({run.key: nll(run, failing) for run in search.runs()})


class TestSearch:
    def test_every_arm_gets_the_same_number_of_tuning_runs_with_their_own_seeds(self) -> None:
        for arm in (NONE, DROPPING):
            runs = search_of(arm).runs()
            assert len({run.key for run in runs}) == 6
            assert {(run.stage, run.seed) for run in runs} == {("tuning", FIRST_SEED), ("tuning", FIRST_SEED + 1)}

    def test_the_lowest_mean_nll_is_chosen_and_edges_are_reported(self) -> None:
        none, dropping = result(search_of(NONE)), result(search_of(DROPPING))
        assert (dropping.chosen, dropping.at_edge) == ({"p": 0.2, "weight_decay": 0.05}, [])
        assert (none.chosen, none.at_edge) == ({"weight_decay": 0.01}, ["weight_decay"])
        assert [trial.settings["p"] for trial in dropping.trials] == [0.1, 0.2, 0.3]
        assert [trial.score for trial in dropping.trials] == pytest.approx([0.6, 0.5, 0.6])

    def test_a_trial_with_a_failed_run_is_not_chosen(self) -> None:
        found = result(search_of(DROPPING), failing=0.2)
        assert [trial.score is None for trial in found.trials] == [False, True, False]
        assert found.chosen["p"] in (0.1, 0.3)

    def test_tuned_settings_are_applied_to_the_run(self) -> None:
        tuned = {"p": 0.3, "lr": 0.5, "weight_decay": 0.0, "label_smoothing": 0.1}
        run = with_settings(search_of(DROPPING).run, tuned)
        assert (run.arm.p, run.optimizer.lr, run.optimizer.weight_decay, run.label_smoothing) == (0.3, 0.5, 0.0, 0.1)


class TestStudy:
    SETTINGS: Mapping[str, Any] = {
        "models": "resnet10t",
        "data": "digits",
        "layers": "layer*.*.bn2",
        "epochs": 1,
        "seeds": 3,
        "arms": [
            "Dropout(p=0.1)",
            "dropblock_resnet(p=0.1)",
            {"peer": "timm.DropBlock2d(drop_prob=0.1)", "like": "Dropout"},
        ],
        "tuning": GRID.model_dump(),
    }

    def study(self, only: Sequence[str] = (), **settings: Any) -> Study:
        return Study(validate({**self.SETTINGS, **settings}, "here"), only)

    def test_peers_use_the_tuned_settings_of_their_counterparts(self) -> None:
        study = self.study()
        searches = study.searches()
        assert [name for _, name in searches] == ["none", "Dropout", "dropblock_resnet"]
        tunings = {arm: result(search) for arm, search in searches.items()}
        entries = {entry.arm.name: entry for entry in study.entries(tunings)}
        peer = entries["timm.DropBlock2d (equal p)"]
        assert peer.arm.p == entries["Dropout"].arm.p == 0.2
        assert (peer.tuning, peer.like) == (None, "Dropout")
        assert entries["Dropout"].tuning is not None
        # A selected peer tunes its counterpart.
        assert [name for _, name in self.study(["timm.DropBlock2d (equal p)"]).searches()] == ["none", "Dropout"]

    def test_every_comparison_has_controls(self) -> None:
        entries = {entry.control: entry for entry in self.study().entries({}) if entry.control}
        still, seeds = entries["aa"], entries["seeds"]
        assert (still.arm.p, still.arm.call, list(still.runs)) == (0.0, "Dropout(p=0.1)", [0, 1, 2])
        assert [run.seed for run in seeds.runs.values()] == [OTHER_SEEDS + i for i in range(3)]
        assert {run.arm.kind for run in seeds.runs.values()} == {"none"}

    def test_a_linear_probe_is_a_tuned_reference_outside_of_holms_correction(self) -> None:
        study = self.study(arms=[{"probe": 0.1}, "Dropout(p=0.1)"])
        assert [name for _, name in study.searches()] == ["none", "linear probe", "Dropout"]
        assert {entry.arm.name: entry.control for entry in study.entries({})}["linear probe"] == "reference"

    def test_the_aa_control_is_an_identity_at_rate_0(self) -> None:
        """`ScaleActivationGrad` is the identity at 1, and stops all gradients at 0."""
        scaling = Arm(name="s", call="ScaleActivationGrad(factor=0.5)", p=0.5, layers=("x",))
        assert [is_identity_at_0(arm) for arm in (scaling, *self.study().arms)] == [False, False, True, True, True]

    def test_no_two_arms_share_a_run_and_selected_arms_have_the_same(self) -> None:
        everything = {entry.arm.name: entry for entry in self.study().entries({})}
        keys = [run.key for entry in everything.values() for run in entry.runs.values()]
        assert len(set(keys)) == len(keys) == 6 * 3
        for entry in self.study(["dropblock_resnet"]).entries({}):
            assert entry.control == "aa" or entry.runs == everything[entry.arm.name].runs

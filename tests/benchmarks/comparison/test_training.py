"""Training runs of a comparison: pairs, controls and outcomes."""

from __future__ import annotations

import getpass
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import hookdrop
from comparison.run.record import Outcome, environment
from comparison.run.training import execute
from comparison.spec.run_spec import Arm, Data, Model, Optimizer, Run
from models.footprint import changes, kept
from tests.support.programs import ROOT

SITES = ("layer*.*.bn2",)
NONE = Arm(name="none", kind="none")
DROPBLOCK = Arm(name="DropBlock", call="DropBlock(p=0.2, block_size=3)", p=0.2, layers=SITES)
RUN = Run(
    data=Data(name="digits", train_size=40, validation_size=40),
    model=Model(name="resnet10t", kwargs={"channels": (16, 24, 32, 48), "stem_width": 8}, identity=("maxpool",)),
    arm=NONE,
    epochs=4,
    seed=3,
)


def outcome_of(**changes: Any) -> Outcome:
    outcome = execute(RUN.model_copy(update=changes)).outcome
    assert outcome is not None
    return outcome


@pytest.fixture(scope="module")
def none() -> Outcome:
    return outcome_of()


@pytest.fixture(scope="module")
def dropblock() -> Outcome:
    return outcome_of(arm=DROPBLOCK)


class TestPairs:
    def test_pairs_share_weights_batches_and_the_first_loss(self, none: Outcome, dropblock: Outcome) -> None:
        for what in ("weights_before", "batches", "first_loss", "train_images", "scored_images"):
            assert dropblock[what] == none[what]  # type: ignore[literal-required]
        assert dropblock["weights_after"] != none["weights_after"]

    def test_other_seeds_have_other_weights_and_batches(self, none: Outcome) -> None:
        other = outcome_of(seed=4)
        assert other["weights_before"] != none["weights_before"]
        assert not set(other["batches"]) & set(none["batches"])

    def test_p_0_is_bit_identical_to_none(self, none: Outcome) -> None:
        still = outcome_of(arm=DROPBLOCK.model_copy(update={"p": 0.0}))
        assert still["sites"] == 4
        for what in ("weights_after", "outputs", "train_loss", "nll"):
            assert still[what] == none[what]  # type: ignore[literal-required]

    def test_runs_are_reproducible(self, dropblock: Outcome) -> None:
        assert outcome_of(arm=DROPBLOCK) == dropblock

    def test_augmentation_is_independent_of_arm_and_masks(self) -> None:
        shifted = RUN.data.model_copy(update={"augmentation": "crop-flip"})
        runs = [outcome_of(data=shifted, arm=arm) for arm in (NONE, DROPBLOCK.model_copy(update={"p": 0.0}))]
        assert runs[0]["weights_after"] == runs[1]["weights_after"]
        assert runs[0]["first_loss"] == runs[1]["first_loss"]


class TestOutcome:
    def test_rates_steps_and_fractions_of_the_last_epochs(self, none: Outcome, dropblock: Outcome) -> None:
        assert (dropblock["steps"], dropblock["rate_at_end"], dropblock["changes"], none["changes"]) == (
            8,
            0.2,
            [],
            None,
        )
        # The last epoch has two steps, at 6/8 and 7/8 of p = 0.2.
        assert dropblock["asked"] == pytest.approx(0.2 * 6.5 / 8)
        # The standard deviation is about 0.003: 40 images with 16 + 24 maps of 16x16, and smaller ones.
        assert dropblock["dropped"] == pytest.approx(dropblock["asked"], abs=0.015)

    def test_footprint_check_detects_changes(self) -> None:
        """`changes` reports other modifications of the model."""
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())
        before = kept(model)
        drop = hookdrop.inject(model, "Dropout(p=0.5)", layers="1")
        model.add_module("2", torch.nn.Tanh())
        model[0].register_forward_hook(lambda *_: None)
        assert changes(model, drop, torch.zeros(2, 3), before) == [
            *("repr after removal", "modules after removal", "hooks after removal"),
        ]

    def test_flags_contain_the_warnings_of_the_plan(self) -> None:
        covering = DROPBLOCK.model_copy(update={"call": "DropBlock(p=0.2, block_size=7)"})
        flags = outcome_of(arm=covering, max_steps=2)["flags"]
        assert any("covers the whole 4x4 map" in flag for flag in flags)

    @pytest.mark.parametrize(("call", "p"), [("GaussianNoise(std=0.1)", 0.1), ("Cutout(p=1.0, size=2)", 1.0)])
    def test_noise_has_no_fraction_and_cutout_no_target(self, call: str, p: float) -> None:
        found = outcome_of(arm=Arm(name="a", call=call, p=p, layers=SITES), max_steps=2)
        assert (found["asked"], found["dropped"] is None, found["sites"]) == (None, "Noise" in call, 4)

    def test_tuning_runs_are_scored_on_validation_images(self) -> None:
        assert outcome_of(stage="tuning", max_steps=2)["scored_images"] == 40

    def test_the_environment_is_json_without_host_user_or_path(self) -> None:
        text = json.dumps(found := environment(), allow_nan=False)
        assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?|", found["git"])
        assert not any(private in text for private in (f'"{getpass.getuser()}"', str(Path.home()), str(ROOT)))


class TestSettings:
    def test_max_steps_stops_early(self) -> None:
        outcome = outcome_of(arm=DROPBLOCK, max_steps=3)
        assert (outcome["steps"], len(outcome["train_loss"])) == (3, 2)

    def test_bfloat16_trains_with_autocast(self, none: Outcome) -> None:
        outcome = outcome_of(precision="bfloat16", max_steps=2)
        assert outcome["first_loss"] == pytest.approx(none["first_loss"], rel=0.02)
        assert outcome["first_loss"] != none["first_loss"]

    def test_a_nonfinite_loss_raises(self) -> None:
        with pytest.raises(FloatingPointError, match=r"the loss of optimizer step \d+ \(epoch 1\) is (nan|inf)"):
            outcome_of(optimizer=Optimizer(name="SGD", lr=1e30))

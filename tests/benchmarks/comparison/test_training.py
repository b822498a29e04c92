"""Training runs of a comparison: pairs, controls, checkpoints and outcomes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from comparison.run import training
from comparison.run.footprint_check import changes, kept
from comparison.run.record import Outcome, Record
from comparison.run.training import execute
from comparison.spec.run_spec import Arm, Data, Model, Optimizer, Run

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


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def made(folder: Path, **changes: Any) -> Record:
    return execute(RUN.model_copy(update=changes), folder)


def outcome_of(folder: Path, **changes: Any) -> Outcome:
    outcome = made(folder, **changes).outcome
    assert outcome is not None
    return outcome


@pytest.fixture(scope="module")
def none(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    torch.set_num_threads(1)
    return outcome_of(tmp_path_factory.mktemp("none"))


@pytest.fixture(scope="module")
def dropblock(tmp_path_factory: pytest.TempPathFactory) -> Record:
    torch.set_num_threads(1)
    return made(tmp_path_factory.mktemp("dropblock"), arm=DROPBLOCK)


class TestPairs:
    def test_pairs_share_weights_batches_and_the_first_loss(self, none: Outcome, dropblock: Record) -> None:
        other = dropblock.outcome
        assert other is not None
        for what in ("weights_before", "batches", "first_loss", "train_images", "scored_images"):
            assert other[what] == none[what]  # type: ignore[literal-required]
        assert other["weights_after"] != none["weights_after"]

    def test_other_seeds_have_other_weights_and_batches(self, none: Outcome, tmp_path: Path) -> None:
        other = outcome_of(tmp_path, seed=4)
        assert other["weights_before"] != none["weights_before"]
        assert not set(other["batches"]) & set(none["batches"])

    def test_p_0_is_bit_identical_to_none(self, none: Outcome, tmp_path: Path) -> None:
        still = outcome_of(tmp_path, arm=DROPBLOCK.model_copy(update={"p": 0.0}))
        assert still["sites"] == 4
        for what in ("weights_after", "outputs", "train_loss", "nll"):
            assert still[what] == none[what]  # type: ignore[literal-required]

    def test_runs_are_reproducible(self, dropblock: Record, tmp_path: Path) -> None:
        assert made(tmp_path, arm=DROPBLOCK).outcome == dropblock.outcome

    def test_augmentation_is_independent_of_arm_and_masks(self, tmp_path: Path) -> None:
        shifted = RUN.data.model_copy(update={"augmentation": "crop-flip"})
        runs = [outcome_of(tmp_path, data=shifted, arm=arm) for arm in (NONE, DROPBLOCK.model_copy(update={"p": 0.0}))]
        assert runs[0]["weights_after"] == runs[1]["weights_after"]
        assert runs[0]["first_loss"] == runs[1]["first_loss"]


class TestOutcome:
    def test_the_rate_ramps_over_all_steps(self, dropblock: Record) -> None:
        outcome = dropblock.outcome
        assert outcome is not None
        assert outcome["steps"] == 8
        assert outcome["rate_at_end"] == 0.2

    def test_requested_and_dropped_rates_of_the_last_epochs(self, dropblock: Record) -> None:
        outcome = dropblock.outcome
        assert outcome is not None
        # The last epoch has two steps, at 6/8 and 7/8 of p = 0.2.
        assert outcome["asked"] == pytest.approx(0.2 * 6.5 / 8)
        # The standard deviation is about 0.003: 40 images with 16 + 24 maps of 16x16, and smaller ones.
        assert outcome["dropped"] == pytest.approx(outcome["asked"], abs=0.015)

    def test_hooks_do_not_change_the_model(self, none: Outcome, dropblock: Record) -> None:
        assert none["changes"] is None
        assert dropblock.outcome is not None
        assert dropblock.outcome["changes"] == []

    def test_footprint_check_detects_changes(self) -> None:
        """`changes` reports other modifications of the model."""
        import hookdrop

        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())
        before = kept(model)
        drop = hookdrop.inject(model, "Dropout(p=0.5)", layers="1")
        model.add_module("2", torch.nn.Tanh())
        model[0].register_forward_hook(lambda *_: None)
        assert changes(model, drop, torch.zeros(2, 3), before) == [
            *("repr after removal", "modules after removal", "hooks after removal"),
        ]

    def test_flags_contain_the_warnings_of_the_plan(self, tmp_path: Path) -> None:
        covering = DROPBLOCK.model_copy(update={"call": "DropBlock(p=0.2, block_size=7)"})
        flags = outcome_of(tmp_path, arm=covering, max_steps=2)["flags"]
        assert any("covers the whole 4x4 map" in flag for flag in flags)

    def test_regularizers_that_drop_nothing_have_no_fraction(self, tmp_path: Path) -> None:
        noise = outcome_of(tmp_path, arm=Arm(name="n", call="GaussianNoise(std=0.1)", p=0.1, layers=SITES), max_steps=2)
        assert (noise["asked"], noise["dropped"], noise["sites"]) == (None, None, 4)

    def test_cutout_has_a_dropped_fraction_but_no_target(self, tmp_path: Path) -> None:
        cutout = outcome_of(tmp_path, arm=Arm(name="c", call="Cutout(p=1.0, size=2)", p=1.0, layers=SITES), max_steps=2)
        assert cutout["asked"] is None
        assert cutout["dropped"]

    def test_tuning_runs_are_scored_on_validation_images(self, tmp_path: Path) -> None:
        record = made(tmp_path, stage="tuning")
        assert record.outcome is not None
        assert record.outcome["scored_images"] == 40


class TestSettings:
    def test_max_steps_stops_early(self, tmp_path: Path) -> None:
        outcome = outcome_of(tmp_path, arm=DROPBLOCK, max_steps=3)
        assert (outcome["steps"], len(outcome["train_loss"])) == (3, 2)

    def test_bfloat16_trains_with_autocast(self, none: Outcome, tmp_path: Path) -> None:
        outcome = outcome_of(tmp_path, precision="bfloat16", max_steps=2)
        assert outcome["first_loss"] == pytest.approx(none["first_loss"], rel=0.02)
        assert outcome["first_loss"] != none["first_loss"]

    def test_a_nonfinite_loss_raises(self, tmp_path: Path) -> None:
        with pytest.raises(FloatingPointError, match=r"the loss of optimizer step \d+ \(epoch 1\) is (nan|inf)"):
            outcome_of(tmp_path, optimizer=Optimizer(name="SGD", lr=1e30))


class TestCheckpoints:
    @pytest.mark.parametrize("arm", [NONE, DROPBLOCK], ids=["none", "DropBlock"])
    def test_a_resumed_run_is_bit_identical(self, arm: Arm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(training, "SECONDS", 0.0)
        run, saved = RUN.model_copy(update={"arm": arm, "epochs": 6}), []
        save = training.Checkpoint.save

        def interrupted(checkpoint: training.Checkpoint, epoch: int, history: Any) -> None:
            saved.append(epoch)
            if saved == [1, 2, 3, 4]:
                raise KeyboardInterrupt
            save(checkpoint, epoch, history)

        monkeypatch.setattr(training.Checkpoint, "save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            execute(run, tmp_path)
        resumed = execute(run, tmp_path)
        assert saved == [1, 2, 3, 4, 4]
        # The checkpoint is kept until the record is stored.
        assert list(tmp_path.iterdir()) == [training.checkpoint_path(tmp_path, run.key)]
        whole = execute(run, tmp_path / "whole")
        assert resumed.outcome == whole.outcome

    @pytest.mark.parametrize("content", [b"", b"torn", b"PK\x03\x04 torn"])
    def test_a_damaged_checkpoint_is_ignored(self, none: Outcome, tmp_path: Path, content: bytes) -> None:
        (tmp_path / f"{RUN.key}.pt").write_bytes(content)
        assert outcome_of(tmp_path) == none

    def test_measured_epochs_are_not_checkpointed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(training, "SECONDS", 0.0)
        saved: list[int] = []
        monkeypatch.setattr(training.Checkpoint, "save", lambda _, epoch, history: saved.append(epoch))
        outcome_of(tmp_path, epochs=4)
        assert saved == [1, 2]
        assert training.MEASURED_PART == 20

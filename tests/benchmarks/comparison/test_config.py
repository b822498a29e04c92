"""The specification of a comparison: the configuration, arms, peers, models, and their errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

import hookdrop
from comparison.run import models
from comparison.spec import arms
from comparison.spec.config import Config, validate
from comparison.spec.run_spec import Arm, ConfigError, Model
from tests.support.programs import ROOT

CONFIGS = ROOT / "benchmarks" / "configs"
GOOD = """
models: resnet10t
data: digits
layers: "layer*.*.bn2"
epochs: 3
arms:
  - DropBlock(p=0.1, block_size=3)
"""


def config_of(text: str) -> Config:
    return validate(yaml.safe_load(text), "mine.yaml")


class TestConfigFile:
    def test_a_minimal_file_is_a_complete_comparison(self) -> None:
        config = config_of(GOOD)
        call, layers = "DropBlock(p=0.1, block_size=3)", ("layer*.*.bn2",)
        assert config.all_arms() == [Arm(name="DropBlock", kind="regularizer", call=call, p=0.1, layers=layers)]
        assert [(data.name, model.name) for data, model in config.cells()] == [("digits", "resnet10t")]

    @pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
    def test_shipped_configs_are_valid(self, path: Path) -> None:
        config = validate(yaml.safe_load(path.read_text()), path.name)
        assert config.title
        assert len(config.all_arms()) >= 2

    def test_only_arms_with_hooks_need_layers(self) -> None:
        arms = "[{peer: timm.drop_path_rate(p=0.1), like: stochastic_depth}, {probe: 0.1}, stochastic_depth(p=0.1)]"
        config = config_of(f"models: resnet10t\ndata: digits\nepochs: 3\narms: {arms}\n")
        found = {arm.name: (arm.kind, arm.schedule, arm.lr, arm.p) for arm in config.all_arms()}
        assert found == {
            "timm.drop_path_rate": ("peer", "none", None, 0.1),
            "linear probe": ("probe", "none", 0.1, None),
            "stochastic_depth": ("recipe", "LinearSchedule", None, 0.1),
        }


class TestConfigErrors:
    @pytest.mark.parametrize(
        ("wrong", "said"),
        [
            (GOOD.replace("epochs: 3", "epochs: -3"), "mine.yaml: epochs: Input should be greater than 0, got -3"),
            (GOOD.replace("epochs: 3", "epoch: 3"), "mine.yaml: epoch: Extra inputs are not permitted"),
            (GOOD.replace("DropBlock(", "DropBlok("), "arms[0]: parse: 'DropBlok' is not a hookdrop regularizer, recipe or schedule.\n  did you mean: DropBlock"),
            (GOOD.replace("p=0.1", "p=1.5"), "[0, 1], got 1.5"),
            (GOOD.replace("block_size", "blocksize"), "blocksize"),
            (GOOD.replace("- Drop", "- peer: timm.Drop"), "'timm.DropBlock' is not a peer.\n  did you mean: timm.DropBlock2d"),
            (GOOD.replace("- Drop", "- recipe: Drop"), "'DropBlock' is not a recipe"),
            (GOOD + "seeds: 1\n", "greater than or equal to 2, got 1"),
            (GOOD + "schedule: Linear\n", "'Linear' is not a hookdrop regularizer, recipe or schedule.\n  did you mean: "),
            (GOOD + "schedule: LinearSchedule(cutoff=3)\n", "schedule: parse: 'LinearSchedule(cutoff=3)'"),
            (GOOD + "tuning: {space: {p: [0.1, 0.2], lr: [0.1]}, space_none: {lr: [0.1]}}\n", "2 points for arms with a rate and 1 for arms without one"),
            (GOOD + "tuning: {space: {p: [0.1, 0.2]}, space_none: {weight_decay: [0.1, 0.2]}}\n", "weight_decay must be in both space and space_none"),
            (GOOD + "tuning: {space: {p: [0.1]}, space_none: {p: [0.1]}}\n", "arms without a rate have no p"),
            (GOOD + "tuning: {space: {lr: [0.0, 0.1]}, space_none: {lr: [0.1, 0.2]}}\n", "tuning.space.lr[0]: Input should be greater than 0, got 0.0"),
            (GOOD + "  - {peer: 'timm.DropPath(drop_prob=-0.5)', equal: fraction}\n", "drop_prob must be in [0, 1], got -0.5"),
            (GOOD + "  - timm.DropBlock2d(p=0.1, block_size=3)\n", "unexpected keyword argument 'p'"),
            (GOOD + "  - {regularizer: Dropout(p=0.1), name: 'a, b'}\n", "has a comma"),
            (GOOD + "  - {regularizer: Dropout(p=0.1), name: none}\n", "the name 'none' is reserved"),
            (GOOD + "  - {peer: 'timm.DropPath(drop_prob=0.1)', like: Drop}\n", "no regularizer or recipe is named 'Drop'"),
            (GOOD + "  - DropBlock(p=0.1, block_size=3)\n", "is duplicate or reserved"),
            (GOOD + "  - {name: mine}\n", "arms[1]: an arm has exactly one of"),
            (GOOD + "  - {recipe: 'dropblock_resnet(p=0.1)', layers: x}\n", "takes no `layers`: remove it"),
            (GOOD + "  - {regularizer: Dropout(p=0.1), equal: fraction}\n", "takes no `equal`"),
            (GOOD + "  - {peer: timm.drop_path_rate(p=0.1), equal: fraction}\n", "takes no `equal`"),
            (GOOD + "  - {probe: 0.1}\ntuning: {space: {lr: [0.1, 1]}, space_none: {lr: [0.1, 1]}}\n", "a probe has its own learning rate"),
            (GOOD.replace('layers: "layer*.*.bn2"', ""), "`layers` is missing"),
            (GOOD.replace("models: resnet10t", "models: [resnet10t, {name: resnet10t, kwargs: {stem_width: 8}}]"), "two cells are named 'resnet10t on digits, all images'"),
        ],
    )  # fmt: skip
    def test_names_the_place_and_the_fix(self, wrong: str, said: str) -> None:
        with pytest.raises(ConfigError) as caught:
            config_of(wrong)
        assert said in str(caught.value)
        assert str(caught.value).endswith("Nothing was trained.")

    def test_all_errors_are_reported_together(self) -> None:
        with pytest.raises(ConfigError, match=r"mine\.yaml: epochs: (.|\n)*mine\.yaml: arms\[0\]: "):
            config_of(GOOD.replace("epochs: 3", "epochs: -3").replace("p=0.1", "p=2"))


class TestPeers:
    SHAPES = ((1, 32, 8, 8), (1, 16, 16, 16))

    @pytest.mark.parametrize(
        "text", ["torchvision.DropBlock2d(0.1, block_size=3)", "timm.DropBlock2d(0.1, block_size=3)"]
    )
    def test_at_equal_fraction_peers_drop_the_requested_fraction(self, text: str) -> None:
        before = torch.get_rng_state()
        rate = arms.rate_for(text, 0.2, self.SHAPES)
        assert torch.equal(before, torch.get_rng_state())
        torch.manual_seed(1)
        module = arms.at_rate(arms.read("peer", text), rate).train()
        zeros = [(module(torch.ones(200, *shape[1:])) == 0).double() for shape in self.SHAPES]
        dropped = torch.cat([part.flatten() for part in zeros]).mean().item()
        # The standard deviation is about 0.001, of this sample and of the one that determined the rate.
        assert dropped == pytest.approx(0.2, abs=0.005)
        assert rate != pytest.approx(0.2, abs=0.005)

    def test_unreachable_fraction(self) -> None:
        with pytest.raises(ValueError, match=r"cannot drop 0\.9"):
            arms.rate_for("torchvision.DropBlock2d(0.1, block_size=7)", 0.9, ((1, 8, 14, 14),))

    def test_a_peer_uses_the_tuned_settings_of_its_counterpart(self) -> None:
        config = config_of(
            GOOD + "  - DropPath(p=0.1)\n  - torchvision.StochasticDepth(p=0.1)\n"
            "  - timm.DropBlock2d(0.1)\n  - {peer: timm.DropPath(0.1), like: DropBlock}\n"
        )
        likes = [config.like(arm.name) for arm in config.all_arms()]
        assert likes == ["DropBlock", "DropPath", "DropPath", "DropBlock", "DropBlock"]


@pytest.fixture(scope="module")
def resnet() -> nn.Module:
    return models.build(Model(name="resnet10t", kwargs={"channels": (16, 24, 32, 48), "stem_width": 8}), 10, 1)


class TestArms:
    @pytest.mark.parametrize(
        ("kind", "text", "count"),
        [
            ("regularizer", "DropBlock(p=0.5, block_size=3)", 4),
            ("regularizer", "GaussianNoise(std=0.5)", 4),
            ("peer", "timm.DropBlock2d(0.5, block_size=3)", 4),
            ("recipe", "dropblock_resnet(p=0.5, block_size=3)", 6),
            ("recipe", "stochastic_depth(p=0.5)", 4),
        ],
    )
    def test_every_kind_of_arm_is_planned_at_its_rate(
        self, resnet: nn.Module, kind: str, text: str, count: int
    ) -> None:
        arm = Arm(name="a", kind=kind, call=text, p=0.1, layers=("layer*.*.bn2",) if kind != "recipe" else ())  # type: ignore[arg-type]
        assert arms.rate_of(arms.read(kind, text)) == 0.5
        example = torch.zeros(2, 1, 64, 64)
        spec = arms.injection(arm, resnet, example)
        assert spec is not None
        planned = hookdrop.plan(resnet, spec, total_steps=100, example_input=example)
        assert len(planned.sites) == count
        assert max(site.p or 0.0 for site in planned.sites) == 0.1
        assert planned.schedule == hookdrop.LinearSchedule(steps=100)

    def test_the_text_of_an_arm_has_its_rate(self) -> None:
        def text(call: str, kind: str = "regularizer") -> str:
            return arms.text_at_rate(Arm(name="a", kind=kind, call=call, p=0.25))  # type: ignore[arg-type]

        assert hookdrop.parse(text("DropBlock(p=0.1, block_size=5)")).p == 0.25
        assert text("stochastic_depth(p=0.1)", "recipe").startswith("stochastic_depth(p=0.25")
        assert text("timm.DropPath(0.25)", "peer") == "timm.DropPath(0.25)"
        assert text("timm.DropPath(0.1)", "peer") == "timm.DropPath(0.1) with drop_prob=0.25"


class TestModels:
    @pytest.mark.parametrize(
        ("model", "channels", "said"),
        [
            (Model(name="resnet10"), 3, "no model is named 'resnet10'(.|\n)*did you mean: resnet10t"),
            (Model(name="torchvision:resnet18"), 1, "requires images with 3 channels"),
            (Model(name="resnet18", kwargs={"color": 3}), 3, "cannot build the model"),
            (Model(name="resnet18", identity=("max_pool",)), 3, "did you mean: maxpool"),
        ],
    )
    def test_invalid_models(self, model: Model, channels: int, said: str) -> None:
        with pytest.raises(ConfigError, match=said):
            models.build(model, 10, channels)

    def test_a_prefix_selects_the_library(self) -> None:
        assert models.build(Model(name="torchvision:resnet18"), 10, 3).fc.out_features == 10
        assert type(models.build(Model(name="resnet18"), 10, 1)).__module__.startswith("timm")

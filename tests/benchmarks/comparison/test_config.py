"""The specification of a comparison: YAML with line numbers, calls, schedules, peers, arms, and their errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import hookdrop

pytest.importorskip("timm")
pytest.importorskip("torchvision")
pytest.importorskip("sklearn")
pytest.importorskip("pydantic")
pytest.importorskip("yaml")
pytest.importorskip("optuna")
from comparison.run import models
from comparison.run.pyramidnet import PyramidNet
from comparison.spec import arms, call_syntax, peers, yaml_lines
from comparison.spec.config import Config, validate
from comparison.spec.errors import ConfigError
from comparison.spec.run_spec import Arm, Data, Model, Run
from comparison.spec.seeds import generator, seed_of
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
    return validate(*yaml_lines.load(text, "mine.yaml"))


def error_of(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        config_of(text)
    return str(caught.value)


class TestConfigFile:
    def test_a_minimal_file_is_a_complete_comparison(self) -> None:
        config = config_of(GOOD)
        (arm,) = config.all_arms()
        assert (arm.name, arm.kind, arm.call, arm.p) == ("DropBlock", "regularizer", "DropBlock(block_size=3)", 0.1)
        assert arm.layers == ("layer*.*.bn2",)
        assert [(data.name, model.name) for data, model in config.cells()] == [("digits", "resnet10t")]

    def test_cells_combine_every_size_dataset_and_model(self) -> None:
        config = config_of(GOOD.replace("digits", "[digits, digits-noisy]") + "train_sizes: [50, 100]\n")
        assert len(list(config.cells())) == 4

    @pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
    def test_shipped_configs_are_valid(self, path: Path) -> None:
        config = validate(*yaml_lines.load(path.read_text(), path.name))
        assert config.title
        assert len(config.all_arms()) >= 2

    def test_configs_of_committed_results_have_at_least_16_seeds(self) -> None:
        for name in ("digits", "synthetic"):
            assert validate(*yaml_lines.load((CONFIGS / f"{name}.yaml").read_text(), name)).seeds >= 16


class TestConfigErrors:
    @pytest.mark.parametrize(
        ("line", "wrong", "said"),
        [
            (5, GOOD.replace("epochs: 3", "epochs: -3"), "greater than 0, got -3"),
            (5, GOOD.replace("epochs: 3", "epoch: 3"), "unknown setting 'epoch'.\n  did you mean: epochs"),
            (7, GOOD.replace("DropBlock(", "DropBlok("), "'DropBlok' is not a hookdrop regularizer, recipe or schedule.\n  did you mean: DropBlock"),
            (7, GOOD.replace("p=0.1", "p=1.5"), "[0, 1], got 1.5"),
            (7, GOOD.replace("p=0.1", "p=x"), "cannot parse"),
            (7, GOOD.replace("block_size", "blocksize"), "blocksize"),
            (7, GOOD.replace("- Drop", "- peer: timm.Drop"), "'timm.DropBlock' is not a peer.\n  did you mean: timm.DropBlock2d"),
            (7, GOOD.replace("- Drop", "- recipe: Drop"), "'DropBlock' is not a recipe"),
            (8, GOOD + "seeds: 1\n", "greater than or equal to 2, got 1"),
            (8, GOOD + "schedule: Linear\n", "'Linear' is not a hookdrop regularizer, recipe or schedule.\n  did you mean: "),
            (8, GOOD + "data: digits\n", "duplicate setting 'data'"),
            (8, GOOD + "tuning: {space: {p: [0.1, 0.2], lr: [0.1]}, space_none: {lr: [0.1]}}\n", "2 points for arms with a rate and 1 for arms without one"),
            (8, GOOD + "tuning: {space: {p: [0.1, 0.2]}, space_none: {weight_decay: [0.1, 0.2]}}\n", "weight_decay must be in both space and space_none"),
            (8, GOOD + "tuning: {space: {p: [0.1]}, space_none: {p: [0.1]}}\n", "arms without a rate have no p"),
            (8, GOOD + "tuning: {space: {lr: [0.0, 0.1]}, space_none: {lr: [0.0, 0.1]}}\n", "lr must be in [1e-12, 1e+06], got 0"),
            (8, GOOD + "tuning: {space: {p: [.nan]}, space_none: {lr: [0.1]}}\n", "finite number"),
            (8, GOOD + "tuning: {space: {lr: [0.1, 0.1]}, space_none: {lr: [0.1, 0.2]}}\n", "duplicate values"),
            (8, GOOD + "optimizer: {lr: .inf}\n", "finite number"),
            (8, GOOD + "title: 2020-13-45\n", "cannot parse '2020-13-45'"),
            (8, GOOD + "5: 5\n", "expected a setting name"),
            (8, GOOD + "? [a, b]\n: 1\n", "expected a setting name"),
            (8, GOOD + "  - {peer: 'timm.DropPath(drop_prob=-0.5)', equal: fraction}\n", "drop_prob must be in [0, 1], got -0.5"),
            (8, GOOD + "  - {peer: 'timm.DropBlock2d(p=0.1, block_size=3)'}\n", "does not accept 'p'; it accepts drop_prob, block_size"),
            (8, GOOD + "  - {recipe: 'dropblock_resnet(p=0.1, example_input=3)'}\n", "has no argument 'example_input'"),
            (8, GOOD + "  - {regularizer: Dropout(p=0.1), name: ''}\n", "at least 1 character"),
            (8, GOOD + "tuning: {method: tpe, space: {p: [0.1, 0.3], lr: [0.1, 1]}, space_none: {lr: [0.1, 1]}}\n", "trials is missing"),
            (8, GOOD + "  - {recipe: 'dropblock_resnet(p=0.1)', layers: x}\n", "selects its own layers"),
            (8, GOOD + "  - {peer: 'timm.DropPath(drop_prob=0.1)', like: Drop}\n", "no regularizer or recipe is named 'Drop'"),
            (8, GOOD + "  - DropBlock(p=0.1, block_size=3)\n", "is duplicate or reserved"),
            (8, GOOD + "  - {regularizer: Dropout(p=0.1), name: none}\n", "the name 'none' is reserved"),
            (8, GOOD + "  - {regularizer: Dropout(p=0.1), equal: fraction}\n", "`equal` and `like` are only valid for a peer"),
            (8, GOOD + "  - {name: mine}\n", "exactly one of"),
            (8, GOOD + "  - {probe: 0.1, layers: x}\n", "a linear probe selects its own layers: remove `layers`"),
            (8, GOOD + "  - {peer: timm.drop_path_rate(p=0.1), schedule: none}\n", "has no schedule: remove `schedule`"),
            (8, GOOD + "  - {peer: timm.drop_path_rate(p=0.1), equal: fraction}\n", "an argument of a model has no sites: remove `equal`"),
            (8, GOOD + "  - {peer: timm.drop_path_rate(drop_prob=0.1)}\n", "does not accept 'drop_prob'; it accepts p"),
            (2, GOOD + "  - {probe: 0.1}\ntuning: {space: {lr: [0.1, 1]}, space_none: {lr: [0.1, 1]}}\n", "a probe has its own learning rate"),
            (4, GOOD.replace("digits", "[digits"), "invalid YAML"),
        ],
    )  # fmt: skip
    def test_names_the_line_and_the_fix(self, line: int, wrong: str, said: str) -> None:
        message = error_of(wrong)
        assert said in message
        if "is duplicate" not in said and "no regularizer or" not in said:
            assert f"mine.yaml, line {line}" in message

    def test_duplicate_cells(self) -> None:
        text = GOOD.replace("models: resnet10t", "models: [resnet10t, {name: resnet10t, kwargs: {stem_width: 8}}]")
        assert "two cells are named 'resnet10t on digits, all images'" in error_of(text)

    def test_recursive_anchor(self) -> None:
        assert "contains itself" in error_of("arms: &a [*a]\n")

    def test_all_errors_are_reported_together(self) -> None:
        message = error_of(GOOD.replace("epochs: 3", "epochs: -3").replace("p=0.1", "p=2"))
        assert "line 5" in message
        assert "line 7" in message
        assert message.endswith("Nothing was trained.")

    @pytest.mark.parametrize("text", ["", "- 1", "3"])
    def test_a_file_that_is_not_a_mapping(self, text: str) -> None:
        assert "expected a mapping of settings" in error_of(text)

    def test_only_arms_with_hooks_need_layers(self) -> None:
        arms = "arms: [timm.drop_path_rate(p=0.1), {probe: 0.1}, {recipe: stochastic_depth(p=0.1)}]"
        arms = arms.replace("timm.drop_path_rate(p=0.1)", "{peer: timm.drop_path_rate(p=0.1), like: stochastic_depth}")
        config = config_of(f"models: resnet10t\ndata: digits\nepochs: 3\n{arms}\n")
        found = {arm.name: (arm.kind, arm.schedule, arm.lr, arm.p) for arm in config.all_arms()}
        assert found == {
            "timm.drop_path_rate": ("peer", "none", None, 0.1),
            "linear probe": ("probe", "none", 0.1, None),
            "stochastic_depth": ("recipe", "LinearSchedule", None, 0.1),
        }

    def test_missing_layers(self) -> None:
        assert "`layers` is missing" in error_of(GOOD.replace('layers: "layer*.*.bn2"', ""))


class TestCalls:
    @pytest.mark.parametrize(
        ("kind", "text", "call", "p"),
        [
            ("regularizer", "DropBlock(0.2, 5)", "DropBlock(block_size=5)", 0.2),
            ("regularizer", "DropBlock(keep_prob=0.75)", "DropBlock()", 0.25),
            ("regularizer", "GaussianNoise(std=0.3)", "GaussianNoise()", 0.3),
            ("regularizer", "ClipActivationGrad(max_norm=1.0)", "ClipActivationGrad(max_norm=1.0)", None),
            ("peer", "timm.DropBlock2d(0.2, block_size=5)", "timm.DropBlock2d(block_size=5)", 0.2),
            ("peer", "torchvision.StochasticDepth(p=0.2, mode='batch')", "torchvision.StochasticDepth(mode='batch')", 0.2),
            ("recipe", "dropblock_resnet(0.2, 5)", "dropblock_resnet(block_size=5)", 0.2),
        ],
    )  # fmt: skip
    def test_a_call_is_split_from_its_rate(self, kind: str, text: str, call: str, p: float | None) -> None:
        assert arms.split_rate(kind, text) == (call, p)

    def test_a_full_call_includes_the_rate(self) -> None:
        arm = Arm(name="a", call="DropBlock(block_size=5)", p=0.25)
        assert hookdrop.parse(arms.full_call(arm)).p == 0.25
        assert (
            arms.full_call(Arm(name="a", kind="peer", call="timm.DropPath()", p=0.2)) == "timm.DropPath(drop_prob=0.2)"
        )

    @pytest.mark.parametrize("text", ["DropBlock(p=f(1))", "DropBlock(**{})", "a b", "", "lambda: 1", "x[0](1)"])
    def test_calls_are_not_evaluated(self, text: str) -> None:
        with pytest.raises(ValueError, match="cannot parse"):
            call_syntax.parse_call(text)

    def test_a_peer_without_a_rate(self) -> None:
        with pytest.raises(ValueError, match="has no rate: write timm.DropPath"):
            arms.split_rate("peer", "timm.DropPath()")


class TestSchedules:
    def test_default_covers_the_whole_training(self) -> None:
        assert call_syntax.parse_schedule("LinearSchedule") == hookdrop.LinearSchedule(steps=1.0)

    def test_a_float_is_a_fraction_of_the_training_and_an_int_is_a_step(self) -> None:
        cosine = hookdrop.CosineSchedule(steps=0.5, delay=0.25)
        assert call_syntax.parse_schedule("CosineSchedule(steps=0.5, delay=0.25)") == cosine
        assert call_syntax.parse_schedule("EarlySchedule(0.5)") == hookdrop.EarlySchedule(cutoff=0.5)
        assert call_syntax.parse_schedule("LateSchedule(cutoff=7)") == hookdrop.LateSchedule(cutoff=7)

    def test_none_applies_the_full_rate_from_the_start(self) -> None:
        assert call_syntax.parse_schedule("none") is None

    @pytest.mark.parametrize("text", ["LinearSchedule(steps=1.5)", "LinearSchedule(cutoff=3)", "Linear", "1"])
    def test_invalid_schedules_raise(self, text: str) -> None:
        with pytest.raises(ValueError):
            call_syntax.parse_schedule(text)


class TestPeers:
    SHAPES = [(1, 32, 8, 8), (1, 16, 16, 16)]

    @pytest.mark.parametrize("text", ["torchvision.DropBlock2d(block_size=3)", "timm.DropBlock2d(block_size=3)"])
    def test_at_equal_fraction_peers_drop_the_requested_fraction(self, text: str) -> None:
        rate = peers.rate_for(call_syntax.parse_call(text), 0.2, self.SHAPES)
        torch.manual_seed(1)
        module = peers.make(call_syntax.parse_call(text), rate).train()
        zeros = [(module(torch.ones(200, *shape[1:])) == 0).double() for shape in self.SHAPES]
        dropped = torch.cat([part.flatten() for part in zeros]).mean().item()
        # The standard deviation is about 0.001, of this sample and of the one that determined the rate.
        assert dropped == pytest.approx(0.2, abs=0.005)
        assert rate != pytest.approx(0.2, abs=0.005)

    @pytest.mark.parametrize("text", ["torchvision.StochasticDepth()", "timm.DropPath()"])
    def test_peers_that_drop_samples_need_no_other_rate(self, text: str) -> None:
        assert peers.rate_for(call_syntax.parse_call(text), 0.2, [(1, 64, 8, 8)]) == pytest.approx(0.2, abs=0.06)

    def test_the_global_generator_is_not_used(self) -> None:
        before = torch.get_rng_state()
        peers.rate_for(call_syntax.parse_call("timm.DropBlock2d(block_size=5)"), 0.15, self.SHAPES)
        assert torch.equal(before, torch.get_rng_state())

    def test_unreachable_fraction(self) -> None:
        with pytest.raises(ValueError, match=r"cannot drop 0\.9"):
            peers.rate_for(call_syntax.parse_call("torchvision.DropBlock2d(block_size=7)"), 0.9, [(1, 8, 14, 14)])

    def test_a_peer_uses_the_tuned_settings_of_its_counterpart(self) -> None:
        config = config_of(
            GOOD + "  - DropPath(p=0.1)\n  - peer: torchvision.StochasticDepth(p=0.1)\n"
            "  - peer: timm.DropBlock2d(0.1)\n  - {peer: timm.DropPath(0.1), like: DropBlock}\n"
        )
        likes = [config.like(arm.name) for arm in config.all_arms()]
        assert likes == ["DropBlock", "DropPath", "DropPath", "DropBlock", "DropBlock"]


@pytest.fixture(scope="module")
def resnet() -> nn.Module:
    return models.build(Model(name="resnet10t", kwargs={"channels": (16, 24, 32, 48), "stem_width": 8}), 10, 1)


class TestArms:
    def test_every_kind_of_arm_can_be_planned(self, resnet: nn.Module) -> None:
        example, sites = torch.zeros(1, 1, 64, 64), ("layer*.*.bn2",)
        for kind, text, count in (
            ("regularizer", "DropBlock(block_size=3)", 4),
            ("regularizer", "GaussianNoise()", 4),
            ("peer", "timm.DropBlock2d(block_size=3)", 4),
            ("recipe", "dropblock_resnet(block_size=3)", 6),
            ("recipe", "stochastic_depth()", 4),
        ):
            arm = Arm(name="a", kind=kind, call=text, p=0.1, layers=sites if kind != "recipe" else ())  # type: ignore[arg-type]
            settings = arms.arguments(arm, resnet, 100, example)
            assert settings is not None
            planned = hookdrop.plan(resnet, **settings)
            assert len(planned.sites) == count
            assert planned.schedule == hookdrop.LinearSchedule(steps=100)

    def test_none_has_no_hooks(self, resnet: nn.Module) -> None:
        assert arms.arguments(Arm(name="none", kind="none"), resnet, 100, None) is None


class TestModels:
    def test_unknown_model(self) -> None:
        with pytest.raises(ConfigError, match="no model is named 'resnet10'(.|\n)*did you mean: resnet10t"):
            models.build(Model(name="resnet10"), 10, 3)

    def test_a_prefix_selects_the_library(self) -> None:
        assert models.build(Model(name="torchvision:resnet18"), 10, 3).fc.out_features == 10
        assert type(models.build(Model(name="resnet18"), 10, 1)).__module__.startswith("timm")
        with pytest.raises(ConfigError, match="requires images with 3 channels"):
            models.build(Model(name="torchvision:resnet18"), 10, 1)

    def test_unsupported_settings(self) -> None:
        with pytest.raises(ConfigError, match="cannot build the model"):
            models.build(Model(name="resnet18", kwargs={"color": 3}), 10, 3)

    def test_unknown_module_to_replace(self) -> None:
        with pytest.raises(ConfigError, match="did you mean: maxpool"):
            models.build(Model(name="resnet18", identity=("max_pool",)), 10, 3)

    def test_pyramidnet_has_the_parameters_of_the_paper(self) -> None:
        """Han et al. 2017: PyramidNet-200 with bottlenecks, alpha 240, has 26.8 M parameters on CIFAR-100."""
        parameters = sum(parameter.numel() for parameter in PyramidNet(200, 240).parameters())
        assert round(parameters / 1e6, 1) == 26.8
        small = PyramidNet(20, 24, classes=7)
        assert small(torch.zeros(2, 3, 32, 32)).shape == (2, 7)
        with pytest.raises(ValueError, match="such as 191 or 200"):
            PyramidNet(199)


class TestRandomStreams:
    @given(st.integers(0, 2**40), st.text(max_size=8), st.text(max_size=8))
    def test_every_name_has_its_own_seed(self, seed: int, one: str, other: str) -> None:
        assert (seed_of(seed, one) == seed_of(seed, other)) == (one == other)
        assert 0 <= seed_of(seed, one) < 2**63

    def test_a_generator_does_not_affect_the_global_one(self) -> None:
        before = torch.get_rng_state()
        first = torch.rand(3, generator=generator(1, "order", 2))
        assert torch.equal(first, torch.rand(3, generator=generator(1, "order", 2)))
        assert torch.equal(before, torch.get_rng_state())


class TestRunKey:
    RUN = Run(data=Data(name="digits"), model=Model(name="x"), arm=Arm(name="none", kind="none"), epochs=1, seed=0)

    def test_equal_settings_have_equal_keys(self) -> None:
        assert self.RUN.key == Run.model_validate(self.RUN.model_dump(mode="json")).key

    @pytest.mark.parametrize(
        "change",
        [{"seed": 1}, {"epochs": 2}, {"stage": "tuning"}, {"compile": True}, {"arm": Arm(name="none", kind="none", p=0.1)}, {"data": Data(name="digits", strict=True)}],
    )  # fmt: skip
    def test_different_settings_have_different_keys(self, change: dict[str, object]) -> None:
        assert self.RUN.model_copy(update=change).key != self.RUN.key

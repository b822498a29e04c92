"""The specification of a comparison: configuration, arms, peers, models and their errors; tuning and the runs of a study."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import hookdrop
from comparison.run import models
from comparison.spec import arms
from comparison.spec.arms import is_identity_at_0
from comparison.spec.config import NONE, Config, validate
from comparison.spec.run_spec import Arm, ConfigError, Data, Model, Run
from comparison.spec.study import OTHER_SEEDS, Study
from comparison.spec.tuning import FIRST_SEED, Search, Tuning, TuningConfig, with_settings
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


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (GOOD.replace("epochs: 3", "epoch: 3"), "mine.yaml: epoch: Extra inputs are not permitted"),
        (GOOD.replace("DropBlock(", "DropBlok("), "arms[0]: parse: 'DropBlok' is not a hookdrop regularizer, recipe or schedule.\n  did you mean: DropBlock"),
        (GOOD.replace("- Drop", "- peer: timm.Drop"), "'timm.DropBlock' is not a peer.\n  did you mean: timm.DropBlock2d"),
        (GOOD + "tuning: {space: {p: [0.1, 0.2], lr: [0.1]}, space_none: {lr: [0.1]}}\n", "2 points for arms with a rate and 1 for arms without one"),
        (GOOD + "tuning: {space: {p: [0.1, 0.2]}, space_none: {weight_decay: [0.1, 0.2]}}\n", "weight_decay must be in both space and space_none"),
        (GOOD + "tuning: {space: {p: [0.1]}, space_none: {p: [0.1]}}\n", "arms without a rate have no p"),
        (GOOD + "  - {regularizer: Dropout(p=0.1), name: 'a, b'}\n", "has a comma"),
        (GOOD + "  - {regularizer: Dropout(p=0.1), name: none}\n", "the name 'none' is reserved"),
        (GOOD + "  - {peer: 'timm.DropPath(drop_prob=0.1)', like: Drop}\n", "no regularizer or recipe is named 'Drop'"),
        (GOOD + "  - DropBlock(p=0.1, block_size=3)\n", "is duplicate or reserved"),
        (GOOD + "  - {regularizer: Dropout(p=0.1), equal: fraction}\n", "takes no `equal`"),
        (GOOD + "  - {peer: timm.drop_path_rate(p=0.1), equal: fraction}\n", "takes no `equal`"),
        (GOOD + "  - {probe: 0.1}\ntuning: {space: {lr: [0.1, 1]}, space_none: {lr: [0.1, 1]}}\n", "a probe has its own learning rate"),
        (GOOD.replace('layers: "layer*.*.bn2"', ""), "`layers` is missing"),
        (GOOD.replace("models: resnet10t", "models: [resnet10t, {name: resnet10t, kwargs: {stem_width: 8}}]"), "two cells are named 'resnet10t on digits, all images'"),
    ],
)  # fmt: skip
def test_names_the_place_and_the_fix(wrong: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(wrong)
    assert said in str(caught.value)
    assert str(caught.value).endswith("Nothing was trained.")


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
    def test_each_kind_of_arm_is_planned_at_its_rate(self, resnet: nn.Module, kind: str, text: str, count: int) -> None:
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


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Model(name="resnet10"), "no model is named 'resnet10'(.|\n)*did you mean: resnet10t"),
        (Model(name="resnet18", kwargs={"color": 3}), "cannot build the model"),
        (Model(name="resnet18", identity=("max_pool",)), "did you mean: maxpool"),
    ],
)
def test_invalid_models(model: Model, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        models.build(model, 10, 3)


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
        "models": "resnet10t", "data": "digits", "layers": "layer*.*.bn2", "epochs": 1, "seeds": 3, "tuning": GRID.model_dump(),
        "arms": ["Dropout(p=0.1)", "dropblock_resnet(p=0.1)", {"peer": "timm.DropBlock2d(drop_prob=0.1)", "like": "Dropout"}],
    }  # fmt: skip

    def study(self, **settings: Any) -> Study:
        return Study(validate({**self.SETTINGS, **settings}, "here"))

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

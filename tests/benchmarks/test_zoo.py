"""`benchmarks/zoo.py`: the full check of a sample of models, and its detection of broken behavior."""

import argparse
import json
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hookdrop
import zoo
from hookdrop import Injection, functional, recipes
from hookdrop.core.hook import SiteHook
from models import catalog
from models.catalog import Example, Trial
from models.check import CheckFailed, NotRunnable, choose_regularizers, label
from models.check import check as check_model
from models.equal import differences
from tests.support.models import Small

# Small models of several kinds of blocks, arguments and outputs; `benchmarks/results/zoo` has all models.
SAMPLE = (
    *("edgenext_xx_small", "ghostnet_050", "levit_128s", "mobilenetv3_small_050", "test_byobnet", "test_coatnet"),
    *(
        "test_convnext",
        "test_efficientnet",
        "test_mambaout",
        "test_nfnet",
        "test_resnet",
        "test_vit",
        "test_vit_relpos",
    ),
)
TORCHVISION = ("googlenet", "lraspp_mobilenet_v3_large", "fasterrcnn_mobilenet_v3_large_320_fpn", "raft_small")


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: socket.socket, address: Any) -> None:
        raise AssertionError(f"download from {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def check(name: str, memory: float = 8.0) -> dict[str, Any]:
    return zoo.check_model(name, argparse.Namespace(memory=memory, recipe=""))


@pytest.mark.filterwarnings("ignore")  # the record contains the warnings of hookdrop
class TestSample:
    @pytest.mark.parametrize(
        "name", [*(f"timm:{name}" for name in SAMPLE), *(f"torchvision:{name}" for name in TORCHVISION)]
    )
    def test_model_passes_the_full_check(self, name: str) -> None:
        if name not in catalog.names():
            pytest.skip(f"this library has no {name}")
        record = check(name)
        assert record["status"] == "passed", record
        assert record["sites"]
        assert record["finite"]
        assert all("drops what the model returns" in one for one in record.get("problems", ()))  # without norms

    def test_model_too_large_for_memory_runs_on_the_meta_device(self) -> None:
        record = check("timm:test_vit", memory=1.0)
        assert record["status"] == "meta", record
        assert record["sites"] == {"Dropout": 13}
        assert record["error"] == "needs about 1.5 GiB, the limit is 1.0 GiB"

    def test_recipe_passes_or_refuses(self, tmp_path: Path) -> None:
        only = "^timm:(test_resnet|test_efficientnet|test_vit)$"
        arguments = ["--out", str(tmp_path), "--workers", "0", "--recipe", "dropblock_resnet", "--only", only]
        assert zoo.main(arguments) == 0
        found = {record["name"]: record for record in json.loads((tmp_path / "zoo.json").read_text())["models"]}
        assert [found[name]["status"] for name in sorted(found)] == ["passed", "passed", "refused"]
        assert "it looks for blocks" in found["timm:test_vit"]["error"]
        assert found["timm:test_resnet"]["asked"] < 0.1  # a quarter of it in the last stage but one
        assert "python benchmarks/zoo.py --recipe dropblock_resnet" in (tmp_path / "zoo.md").read_text()


def flip_a_bit(x: torch.Tensor) -> None:
    x.nextafter_(torch.tensor(9.0))


def also(original: Any, change: Callable[[Any], Any]) -> Callable[..., Any]:
    """A function that does something else with its first argument at the end."""

    def extended(first: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(first, *args, **kwargs)
        change(first)
        return result

    return extended


def drops_always(hook: SiteHook, module: nn.Module, *call: Any) -> object:
    hook.called = True
    return hook.edit(module, (call[0], {}, call[-1]), lambda x: hook.regularizer.regularize(x, 0.1))


def at_rate(factor: float) -> Callable[..., torch.Tensor]:
    return lambda self, x, rate: functional.drop_block(x, rate * factor, self.block_size)


APPLY, INJECT, REMOVE = SiteHook.apply, hookdrop.inject, Injection.remove
BROKEN = [
    (SiteHook, "__call__", drops_always, "eval output differs with hooks"),
    (SiteHook, "__call__", lambda hook, *call: None, "8 sites did not fire"),
    (SiteHook, "apply", lambda hook, x, rate: APPLY(hook, x, rate).detach(), "different parameters have gradients"),
    (torch.optim.SGD, "step", lambda self: None, "the training step updated no parameter"),
    (Injection, "remove", lambda self: None, "remove changed hooks"),
    (Injection, "remove", also(REMOVE, lambda drop: flip_a_bit(drop._model().fc.bias.data[0])), "remove changed a par"),
    (Injection, "remove", also(REMOVE, lambda drop: setattr(drop._model(), "marked", 1)), "remove changed attributes"),
    (hookdrop, "inject", also(INJECT, lambda model: torch.rand(1)), "inject changed the RNG state"),
    (hookdrop, "inject", also(INJECT, lambda model: model.register_buffer("b", torch.ones(1))), "state_dict keys"),
    (hookdrop, "inject", also(INJECT, lambda model: flip_a_bit(model.fc.weight.data[0, 0])), "inject changed a par"),
    *((hookdrop.DropBlock, "regularize", at_rate(factor), "DropBlock dropped") for factor in (0.0, 0.8, 1.25)),
]


class TestDetection:
    """hookdrop is broken in one way, and the check reports it."""

    def test_unbroken_model_passes(self, model: Small, images: torch.Tensor) -> None:
        record = check_model(model, Example((images,), (images,)))
        assert record["sites"] == {"DropBlock": 8}
        assert record["asked"] == pytest.approx(0.1)
        assert "warnings" not in record

    def test_warnings_and_problems_are_recorded_by_kind(self, model: Small, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Injection, "check", lambda self: ["'dropblock': 2 of 4 sites lost: a.\n  do this."])
        x = torch.randn(2, 3, 2, 3)
        record = check_model(model, Example((x,), (x,)))
        assert record["warnings"] == {"DropBlock at '...': block_size=# covers the whole #x# map": 1}
        assert record["problems"] == ["'...': # of # sites lost"]

    def test_model_that_does_not_run_without_hookdrop_is_not_a_failure(self, model: Small) -> None:
        x = torch.ones(2, 4, 16, 16)
        with pytest.raises(NotRunnable, match="expected input"):
            check_model(model, Example((x,), (x,)))

    @pytest.mark.parametrize(("owner", "name", "broken", "message"), BROKEN)
    def test_broken_behavior_fails(
        self, model: Small, images: torch.Tensor, monkeypatch: pytest.MonkeyPatch,
        owner: Any, name: str, broken: Any, message: str,
    ) -> None:  # fmt: skip
        monkeypatch.setattr(owner, name, broken)
        with pytest.raises(CheckFailed, match=message):
            check_model(model, Example((images,), (images,)))


class TestEqualBlocks:
    """The sites of a plan are changed, and the check of equal blocks finds it."""

    @pytest.fixture
    def plan(self) -> hookdrop.Plan:
        class Block(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x + self.mlp(x)

        model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Block(), Block(), Block()))
        return hookdrop.plan(model, recipes.layer_drop(p=0.1), example_input=torch.ones(2, 4))

    def test_equal_sites_agree(self, plan: hookdrop.Plan) -> None:
        assert [site.name for site in plan.sites] == ["1.0", "1.1", "1.2"]
        assert not [*differences(plan)]

    def test_block_without_the_site_of_its_equals_is_found_unless_a_warning_names_it(self, plan: hookdrop.Plan) -> None:
        fewer = replace(plan, sites=plan.sites[:2])
        assert [*differences(fewer)] == ["1.2 has the sites (), others like it have ('',)"]
        assert not [*differences(replace(fewer, warnings=["skipped 1 layer, '1.2': a reason"]))]

    def test_site_that_contains_a_site_or_layers_in_a_row_is_found(self, plan: hookdrop.Plan) -> None:
        around = replace(plan.sites[0], name="1")
        assert [*differences(replace(plan, sites=[around]))] == ["the site '1' contains 3 layers in a row, such as 1.0"]
        assert "the site '1' contains another" in differences(replace(plan, sites=[around, *plan.sites]))


class TestModels:
    def test_first_accepted_trial_is_the_smallest_input(self) -> None:
        name = "timm:vit_tiny_patch16_224"
        trials = catalog.trials(name, skeleton := catalog.skeleton_of(name))
        first = next(trial for trial in trials if catalog.accepted(trial, skeleton))
        assert first == Trial(name, (3, 32, 32), {"img_size": 32})

    @pytest.mark.parametrize(
        ("name", "settings", "kinds"),
        [
            ("convnextv2_tiny", {}, {"stem.1": "DropBlock", "stages.1.blocks.0.norm": "DropBlock NHWC"}),
            (
                "vit_tiny_patch16_224",
                {"img_size": 32, "depth": 1, "qk_norm": True},
                {"norm": "Dropout", "blocks.0.attn.q_norm": "Dropout"},
            ),
        ],
    )
    def test_regularizer_fits_the_rank_of_each_norm(self, name: str, settings: Any, kinds: dict[str, str]) -> None:
        trial = Trial(f"timm:{name}", (3, 32, 32), settings)
        model = trial.build()
        chosen = choose_regularizers(model, hookdrop.layers(model, trial.example().eval))
        assert {name: label(chosen[name]) for name in kinds} == kinds

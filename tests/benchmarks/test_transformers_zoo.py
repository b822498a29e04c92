"""`benchmarks/transformers_zoo.py`: the committed results, and sites that the check has to reject."""

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")


import hookdrop
import sweep
import transformers_zoo
from families import counts, tiny
from families.depth import check_sites
from families.layers import Run, find_runs, with_first
from families.units import check_keys
from hookdrop import DropKey, HeadDropout, functional, recipes
from models.check import CheckFailed
from tests.support.programs import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "transformers"
SAMPLE = [
    ("head_dropout", "xlm", "refused"),
    ("drop_key", "bart", "passed"),
    ("residual_dropout", "gemma2", "passed"),
    ("neftune", "resnet", "no layers"),
]
FOUND: dict[str, Any] = json.loads((RESULTS / "stochastic_depth.json").read_text())


def test_committed_results_match_the_documented_numbers_and_fail_nowhere() -> None:
    page = (ROOT / "docs" / "evidence" / "recipes.md").read_text()
    covered, counted = sweep.coverage(FOUND["totals"])
    assert covered / counted >= 0.95
    assert FOUND["totals"]["failed"] == FOUND["totals"]["crashed"] == 0
    assert f"{covered} of {counted} families" in page.replace("\n", " ")
    assert "(../../benchmarks/results/transformers/stochastic_depth.json)" in page
    for record in FOUND["models"]:
        assert record["status"] not in ("refused", "partial") or record["error"], record["name"]


class SelfAttention(nn.Linear):
    """Mixes nothing; the check only reads its name."""


class PreNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(4), nn.LayerNorm(4)
        self.attn, self.mlp = SelfAttention(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PostNorm(PreNorm):
    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.attn(x))
        return self.norm2(x + self.mlp(x))


class Sandwich(PreNorm):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.norm1(self.attn(x))
        return x + self.norm2(self.mlp(x))


class TestCheckOfSites:
    @staticmethod
    def problems(kind: type[nn.Module], ends: tuple[str, ...], transposed: bool = False) -> list[str]:
        torch.manual_seed(0)
        model = nn.ModuleDict({"layers": nn.ModuleList([kind(), kind()])})
        steps = nn.Sequential(*model["layers"])
        if transposed:
            steps.forward = lambda input: nn.Sequential.forward(steps, input.transpose(0, 1))  # type: ignore[method-assign]
        blocks = {f"layers.{i}": [f"layers.{i}.{end}" for end in ends] for i in range(2)}
        rows = [end for found in blocks.values() for end in found]
        found = check_sites(model, [Run("", steps, {"input": torch.randn(3, 5, 4)})], blocks, rows)
        return sorted(set(found.values()))

    @pytest.mark.parametrize(
        ("kind", "ends"), [(PreNorm, ("attn", "mlp")), (PostNorm, ("attn", "mlp")), (Sandwich, ("norm1", "norm2"))]
    )
    def test_ends_of_all_branches_pass(self, kind: type[nn.Module], ends: tuple[str, ...]) -> None:
        assert self.problems(kind, ends) == []

    def test_missing_branch_is_found(self) -> None:
        assert self.problems(PreNorm, ("attn",)) == ["PreNorm does not reduce to its skip"]

    @pytest.mark.parametrize(("kind", "ends"), [(Sandwich, ("attn", "mlp")), (PostNorm, ("attn", "norm2"))])
    def test_sites_before_a_norm_or_on_the_stream_are_found(self, kind: type[nn.Module], ends: tuple[str, ...]) -> None:
        """The bias of a norm, or the scale that the norm undoes."""
        assert self.problems(kind, ends) != []

    def test_tokens_on_the_first_axis_are_found(self) -> None:
        found = self.problems(PreNorm, ("attn", "mlp"), transposed=True)
        assert [text for text in found if "is not the batch" in text]


class TestCounts:
    """Sites compared with `num_hidden_layers`, `num_attention_heads` and the model's own list of layers."""

    LAYERS = ("encoder.layers.0", "encoder.layers.1")

    @staticmethod
    def differences(recipe: str, sites: tuple[str, ...], warning: str = "", regularizer: Any = None) -> str:
        from transformers import BertConfig

        model = nn.ModuleDict({"encoder": nn.ModuleDict({"layers": nn.ModuleList([PreNorm(), PreNorm()])})})
        model.config = BertConfig(num_hidden_layers=2, num_attention_heads=4)  # type: ignore[assignment]
        planned = [SimpleNamespace(name=name, at="", regularizer=regularizer) for name in sites]
        survey = SimpleNamespace(layers=dict.fromkeys(TestCounts.LAYERS, ()))  # both run
        plan: Any = SimpleNamespace(root=model, sites=planned, warnings=[warning], survey=survey)
        return "; ".join(counts.differences(recipe, model, [(Run("", model, {}), plan)]))

    def test_one_site_per_layer_of_the_config_agrees(self) -> None:
        assert self.differences("layer_drop", self.LAYERS) == ""
        assert self.differences("stochastic_depth", tuple(f"{layer}.mlp" for layer in self.LAYERS)) == ""
        assert self.differences("head_dropout", tuple(f"{layer}.attn" for layer in self.LAYERS)) == ""

    def test_encoder_taken_for_a_layer_is_found(self) -> None:
        """As of Wav2Vec2, whose encoder returns its input plus branches too."""
        found = self.differences("layer_drop", ("encoder",))
        assert found.startswith(
            "the site 'encoder' contains all 2 layers of encoder.layers; sites in 0 of the 2 layers"
        )

    def test_missing_layer_is_found_unless_a_warning_names_it(self) -> None:
        sites = ("encoder.layers.0.mlp",)
        found = self.differences("stochastic_depth", sites)
        assert found.endswith("; sites in 1 of the 2 layers of encoder.layers, none in encoder.layers.1")
        assert self.differences("stochastic_depth", sites, "skipped 1 layer, 'encoder.layers.1': why.") == ""

    def test_number_of_heads_that_the_config_does_not_have_is_found(self) -> None:
        sites = tuple(f"{layer}.attn" for layer in self.LAYERS)
        assert self.differences("head_dropout", sites, regularizer=HeadDropout(0.1, 4)) == ""
        assert "the sites have ['3'] heads" in self.differences("head_dropout", sites, regularizer=HeadDropout(0.1, 3))


def test_keys_that_are_dropped_twice_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    ((run, *_), _, _) = find_runs(next(tiny.models("vit")))
    plan = hookdrop.plan(run.module, recipes.drop_key(p=0.3), example_input=run.inputs)
    check_keys(run, plan)
    twice = staticmethod(lambda x, p, *_: functional.drop_key(functional.drop_key(x, p), p))
    monkeypatch.setattr(DropKey, "regularize", twice)
    with pytest.raises(CheckFailed, match=r"drops 0\.\d+ of its keys, 0\.3 is requested"):
        check_keys(run, plan)


class Dropped(nn.Module):
    """A module with dropout written in after it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.drop = module, nn.Dropout(0.2)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return with_first(self.module(*args, **kwargs), self.drop)


def test_residual_dropout_equals_a_twin_with_dropout_modules() -> None:
    ((run, *_), _, _) = find_runs(next(tiny.models("llama")))
    twin = copy.deepcopy(run.module)
    for layer in twin.get_submodule("layers").children():
        layer.self_attn, layer.mlp = Dropped(layer.get_submodule("self_attn")), Dropped(layer.get_submodule("mlp"))
    outputs = []
    with hookdrop.inject(run.module, recipes.residual_dropout(p=0.2), example_input=run.inputs):
        for model in (run.module.train(), twin.train()):
            torch.manual_seed(0)
            outputs.append(model(**run.inputs).last_hidden_state)
    assert torch.equal(*outputs)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("recipe", "name", "status"), SAMPLE)
def test_family_of_the_sample(tmp_path: Path, recipe: str, name: str, status: str) -> None:
    """The whole sweep covers all families; tests/integration/models/test_stochastic_depth.py has one of each structure.

    It has the recipes that are not here, too.
    """
    command = ["--only", f"^{name}$", "--out", str(tmp_path), "--workers", "0", "--recipe", recipe]
    assert transformers_zoo.main(command) == 0
    (record,) = json.loads((tmp_path / f"{recipe}.json").read_text())["models"]
    assert record["status"] == status, record

"""`benchmarks/transformers_zoo.py`: the committed results, and sites that the check has to reject."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")


import sweep
import transformers_zoo
from families.depth import check_sites
from families.layers import Run
from tests.support.programs import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "transformers"
SAMPLE = [
    ("stochastic_depth", "mpnet", "passed"),
    ("head_dropout", "bert", "passed"),
    ("head_dropout", "xlm", "refused"),
    ("layer_drop", "bart", "passed"),
    ("patch_dropout", "vit", "passed"),
    ("neftune", "gpt2", "passed"),
    ("neftune", "resnet", "no layers"),
]
FOUND: dict[str, Any] = json.loads((RESULTS / "stochastic_depth.json").read_text())


def test_committed_results_match_the_documented_numbers_and_fail_nowhere() -> None:
    page = (ROOT / "docs" / "evidence" / "recipes.md").read_text()
    covered, counted = sweep.coverage(FOUND["totals"])
    assert covered / counted >= 0.95
    assert FOUND["totals"]["failed"] == FOUND["totals"]["crashed"] == 0
    assert f"{covered} of {counted} families" in page.replace("\n", " ")
    for record in FOUND["models"]:
        assert record["status"] not in ("refused", "partial") or f"`{record['name']}`" in page


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
        ("kind", "ends"),
        [(PreNorm, ("attn", "mlp")), (PostNorm, ("attn", "mlp")), (Sandwich, ("norm1", "norm2"))],
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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("recipe", "name", "status"), SAMPLE)
def test_family_of_the_sample(tmp_path: Path, recipe: str, name: str, status: str) -> None:
    """The whole sweep covers all families; tests/integration/models/test_stochastic_depth.py has one of each structure."""
    command = ["--only", f"^{name}$", "--out", str(tmp_path), "--workers", "0", "--recipe", recipe]
    assert transformers_zoo.main(command) == 0
    (record,) = json.loads((tmp_path / f"{recipe}.json").read_text())["models"]
    assert record["status"] == status, record

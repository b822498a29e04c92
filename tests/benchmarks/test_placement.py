"""`benchmarks/placement.py`: a few architectures reproduce the committed results."""

from __future__ import annotations

import json

import pytest

import placement
from tests.support.programs import ROOT

RECORDS = json.loads((ROOT / "benchmarks" / "results" / "placement.json").read_text())["models"]
FOUND = {record["name"]: record for record in RECORDS}


@pytest.mark.parametrize("name", ["resnet18", "efficientnet_lite0", "vgg11", "ese_vovnet19b_dw"])
def test_results_match_the_committed_file(name: str) -> None:
    assert {"name": name, **placement.compare(name)} == FOUND[name]


def test_different_rates_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "SCALES", {"i / n": placement.SCALES["i / n"]})
    assert placement.depth("convnext_atto").startswith("places equal: the rate of stages.")


def test_documented_numbers_match_the_committed_file() -> None:
    equal = [r["stochastic_depth"] for r in FOUND.values() if r["stochastic_depth"].startswith("equal")]
    taken = [r for r in FOUND.values() if r["stochastic_depth"] not in ("untaken", "unused")]
    page = (ROOT / "docs" / "evidence" / "recipes.md").read_text()
    assert f"{len(equal):,} of the {len(taken):,} architectures" in page
    for text in ("equal, i / (n - 1)", "equal, i / n", "equal, p everywhere", "untaken", "unused"):
        assert f"| {sum(r['stochastic_depth'] == text for r in FOUND.values())} |" in page
    assert sum(r["timm_dropblock"] == "equal" for r in FOUND.values()) == 172

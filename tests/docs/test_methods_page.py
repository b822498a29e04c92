"""The method matrix has every method, with the costs of the committed results and the properties of the classes."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from hookdrop import parse, recipes
from hookdrop.regularizers import REGULARIZERS
from tests.support.programs import ROOT

PAGE = (ROOT / "docs" / "methods" / "index.md").read_text()
TABLE = [[cell.strip() for cell in line.split(" | ")] for line in PAGE.splitlines() if line.startswith("| ")][1:]
ROWS = {re.findall(r"\[(\w+)\]", row[0])[0]: row for row in TABLE if "](" in row[0]}
ARMS = {
    "digits": ("Dropout", "Dropout2d", "DropBlock", "DropPath", "dropblock_resnet"),
    "finetune": ("UniformNoise", "MixStyle", "stochastic_depth"),
}


COSTS = json.loads((ROOT / "benchmarks" / "results" / "costs.json").read_text())["methods"]


def arms(study: str) -> list[dict[str, Any]]:
    summary = json.loads((ROOT / "benchmarks" / "results" / study / "summary.json").read_text())
    return list(summary["cells"][0]["arms"])


def test_every_regularizer_and_recipe_has_a_row() -> None:
    named = set(re.findall(r"\w+", " ".join(row[0] for row in TABLE)))
    same = {"Dropout1d": "1d", "Dropout3d": "3d"}
    assert {same.get(name, name) for name in REGULARIZERS} <= named
    assert set(recipes.__all__) - {"Recipe", "RecipeSite"} <= set(re.findall(r"\w+", PAGE))


@pytest.mark.parametrize(("study", "name"), [(study, name) for study, names in ARMS.items() for name in names])
def test_costs_are_those_of_the_committed_results(study: str, name: str) -> None:
    (arm,) = [arm for arm in arms(study) if arm["name"] == name]
    shown = [cell.split(";")[0] for cell in ROWS[name][4:6]]
    assert shown == [f"{arm[kind]['median']:.2f}" for kind in ("time", "memory")]


@pytest.mark.parametrize("name", COSTS)
def test_costs_are_those_of_the_committed_steps(name: str) -> None:
    assert ROWS[name][4:6] == [f"{COSTS[name][kind]:.2f}" for kind in ("time", "memory")]


def test_the_readme_has_the_first_eight_rows() -> None:
    assert re.findall(r"^\| \[(\w+)\]\(docs/methods", (ROOT / "README.md").read_text(), re.M) == list(ROWS)[:8]


@pytest.mark.parametrize(
    "text", ["Dropout(0.1)", "TokenDropout(0.1)", "LayerDrop(0.1)", "NEFTune()", "MixStyle()", "DSU()"]
)
def test_samples_are_independent_as_stated(text: str) -> None:
    row = ROWS[text.partition("(")[0]]
    assert (row[7] == "yes") is bool(parse(text).independent_samples)
    rate = type(parse(text)).rate
    assert rate
    assert row[3].startswith(f"`{rate.attribute}`")

"""`benchmarks/costs.py` measures each method, and its committed results have all of them."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("transformers")
pytest.importorskip("pandas")
import costs
from tests.support.programs import ROOT


def test_committed_results_have_every_method() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "costs.json").read_text())["methods"]
    assert list(found) == [name for _, _, methods in costs.METHODS.values() for name in methods]


def test_methods_of_an_lstm_save_at_least_what_a_step_without_saves() -> None:
    (part,) = [part for model, part in costs.METHODS.items() if model.startswith("LSTM")]
    found = costs.measure(*part, rounds=1)
    assert list(found) == list(part[2])
    assert all(cost["memory"] >= 1 and cost["time"] > 0 for cost in found.values())

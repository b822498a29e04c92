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
    assert list(found) == [name for methods in costs.METHODS.values() for name in methods]


def test_methods_of_an_lstm_save_at_least_what_a_step_without_saves() -> None:
    found = costs.measure("LSTM of 128 units, 16 sequences of 32 steps", rounds=3)
    assert list(found) == list(costs.METHODS["LSTM"])
    assert all(cost["memory"] >= 1 and cost["time"] > 0 for cost in found.values())

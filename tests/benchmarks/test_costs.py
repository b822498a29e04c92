"""`benchmarks/train_step.py --part methods` measures each method, and its committed results have all of them."""

import json
from pathlib import Path

import train_step
from tests.support.programs import ROOT

LSTM = "LSTM of 128 units, 16 sequences of 32 steps"


def test_committed_results_have_every_method() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "costs.json").read_text())["methods"]
    assert list(found) == [name for model in train_step.MODELS for name in train_step.VARIANTS[model]]


def test_methods_of_an_lstm_save_at_least_what_a_step_without_saves(tmp_path: Path) -> None:
    out, names = tmp_path / "costs.json", list(train_step.VARIANTS[LSTM])
    arguments = ["--part", "methods", "--rounds", "3", "--threads", "1", "--only", *names, "--json", str(out)]
    assert train_step.main(arguments) == 0
    found = json.loads(out.read_text())["methods"]
    assert list(found) == names
    assert all(cost["model"] == LSTM and cost["memory"] >= 1 and cost["time"] > 0 for cost in found.values())

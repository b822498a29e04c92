"""The program in `docs/trainers/plain.md`, under torchrun with two processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.code_blocks import blocks_of
from tests.support.programs import ROOT, run_python

pytest.importorskip("timm")
PAGE = ROOT / "docs" / "trainers" / "plain.md"

REPORT = """
import json
rank, gathered = dist.get_rank(), [None, None]
model, drop = parts["model"], parts["drop"]
with torch.no_grad():
    images = torch.ones(4, 3, 32, 32)
    output = model.module(images).sum().item()               # equal weights and inputs: only the masks can differ
weights = sum(parameter.double().sum().item() for parameter in model.parameters())
facts = {"step": drop.step_count, "p": drop.p, "problems": [str(problem) for problem in drop.check()],
         "weights": weights, "output": output}
json.dump(facts, open(f"rank{rank}.json", "w"))
dist.destroy_process_group()
"""


def program() -> str:
    """The definitions of the page's first program and its block for several processes."""
    codes = [block.text for block in blocks_of(PAGE) if block.kind == "code"]
    definitions, found, _ = codes[0].partition("parts = build()")
    assert found
    return definitions + next(code for code in codes if "init_process_group" in code)


def test_ranks_have_equal_weights_and_different_masks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(program() + REPORT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    run_python("train.py", ranks=2)
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first["step"] == second["step"] == 1
    assert first["p"] == second["p"] > 0
    assert first["weights"] == second["weights"]
    assert first["output"] != second["output"]
    assert first["problems"] == second["problems"] == []

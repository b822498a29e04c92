"""The program in `docs/trainers/plain.md`, under torchrun with two processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.code_blocks import blocks_of
from tests.support.programs import ROOT

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


def test_ranks_have_equal_steps_and_weights_and_different_masks(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(program() + REPORT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first["step"] == second["step"] == 1
    assert first["p"] == second["p"] > 0
    assert first["weights"] == second["weights"]
    assert first["output"] != second["output"]
    assert first["problems"] == second["problems"] == []

"""`benchmarks/vit_step.py`: the variants and the results. No test depends on a clock."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("timm")
import vit_step


def test_results_have_a_ratio_for_each_variant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device", "cpu", "--models", "vit_tiny_patch16_224", "--batch", "4", "--rounds", "1"]
    assert vit_step.main([*arguments, "--json", str(tmp_path / "step.json")]) == 0
    found = json.loads((tmp_path / "step.json").read_text())["vit_tiny_patch16_224"]
    assert list(found) == list(vit_step.VARIANTS)
    assert found[vit_step.CLEAN]["ratio"]["median"] == 1.0
    assert "patch_drop_rate" in capsys.readouterr().out

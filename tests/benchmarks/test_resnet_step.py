"""`benchmarks/resnet_step.py`: the models and the results. No test depends on a clock."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("timm")
pytest.importorskip("torchvision")
import resnet_step


@pytest.mark.filterwarnings("ignore:.*covers the whole 7x7 map")
def test_results_have_a_ratio_for_each_drop_block(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At 224 pixels; torchvision rejects the even blocks to which it clamps at some smaller sizes."""
    arguments = ["--device", "cpu", "--model", "resnet18", "--batch", "1", "--rounds", "1", "--modes", "eager"]
    assert resnet_step.main([*arguments, "--json", str(tmp_path / "step.json")]) == 0
    found = json.loads((tmp_path / "step.json").read_text())["eager"]
    assert set(found) == {"no DropBlock", "hookdrop", "torchvision"}
    assert found["no DropBlock"]["ratio"]["median"] == 1.0
    assert "hookdrop" in capsys.readouterr().out

"""`examples/see.py` runs end to end."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("pytorch_grad_cam")
from PIL import Image

from tests.support.programs import ROOT, load

see = load(ROOT / "examples" / "see.py")


def test_see_prints_results_and_draws_a_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = see.main(["--steps", "12", "--out", str(tmp_path / "a.png")])
    printed = capsys.readouterr().out
    assert "p=0.3 of 0.3, step 12 of LinearSchedule(steps=12)" in printed
    assert f"accuracy with DropBlock: {result['with DropBlock']:.1%}" in printed
    assert result["dropped"] == pytest.approx(0.3, abs=0.02)
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.size == (1200, 880)

"""`examples/see.py` runs end to end and is deterministic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sklearn")
pytest.importorskip("pytorch_grad_cam")
from PIL import Image, ImageChops

from tests.support.programs import ROOT, load

see = load(ROOT / "examples" / "see.py")


def run(path: Path) -> dict[str, Any]:
    return see.main(["--steps", "12", "--out", str(path)])


def test_see_prints_results_and_draws_a_deterministic_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(tmp_path / "a.png")
    printed = capsys.readouterr().out
    assert "p=0.3 of 0.3, step 12 of LinearSchedule(steps=12)" in printed
    assert f"accuracy with DropBlock: {result['with DropBlock']:.1%}" in printed
    assert result["dropped"] == pytest.approx(0.3, abs=0.02)
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.size == (1200, 880)
    assert run(tmp_path / "b.png") == result
    # matplotlib's layout may differ in the last bit, and then some pixels by one level.
    with Image.open(tmp_path / "a.png") as a, Image.open(tmp_path / "b.png") as b:
        levels = ImageChops.difference(a.convert("RGB"), b.convert("RGB")).getextrema()
    assert max(most for _, most in levels) <= 1


def test_both_models_train_on_the_same_batches() -> None:
    x, labels, *_ = see.digits()
    torch.manual_seed(0)
    a, b = see.Net(), see.Net()
    b.load_state_dict(a.state_dict())
    see.train(a, x, labels, 2)
    torch.randn(7)
    see.train(b, x, labels, 2)
    assert all(torch.equal(p, q) for p, q in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def test_see_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        see.main(["--help"])
    assert "DropBlock's rate at the end of its ramp" in capsys.readouterr().out

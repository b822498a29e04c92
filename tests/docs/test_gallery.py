"""The gallery is complete and matches the output of `examples/gallery.py`."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

import hookdrop
from hookdrop.regularizers import REGULARIZERS
from tests.support.programs import ROOT, load

PAGE = (ROOT / "docs" / "gallery.md").read_text()

for _needed in ("matplotlib", "sklearn", "torchvision"):
    pytest.importorskip(_needed)


@pytest.fixture(scope="module")
def gallery() -> Any:
    return load(ROOT / "examples" / "gallery.py")


def test_linked_figures_exist_and_are_small() -> None:
    linked = re.findall(r"\]\((gallery/[\w-]+\.png)\)", PAGE)
    assert {f"gallery/{path.name}" for path in (ROOT / "docs" / "gallery").glob("*.png")} == set(linked)
    assert all((ROOT / "docs" / path).stat().st_size < 80_000 for path in linked)


def test_page_shows_every_regularizer() -> None:
    headings = set(re.findall(r"^### (.*)$", PAGE, re.MULTILINE))
    named = {name for heading in headings for name in heading.split(", ")}
    assert set(REGULARIZERS) <= named


def test_page_shows_every_schedule(gallery: Any) -> None:
    public = {name for name in hookdrop.__all__ if name.endswith("Schedule")}
    assert {type(schedule).__name__ for schedule in gallery.SCHEDULES} == public - {"Schedule", "LambdaSchedule"}


def test_program_writes_the_committed_page(gallery: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_see(command: list[str], **_: Any) -> None:  # tested below
        Path(command[-1]).write_bytes((ROOT / "docs" / "gallery" / "see.png").read_bytes())

    monkeypatch.setattr(subprocess, "run", without_see)
    written = gallery.main(["--out", str(tmp_path)])
    assert (tmp_path / "gallery.md").read_text() == PAGE
    assert all(path.stat().st_size > 2_000 for path in written)


def test_see_prints_results_and_draws_a_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pytorch_grad_cam")
    from PIL import Image

    result = load(ROOT / "examples" / "see.py").main(["--steps", "12", "--out", str(tmp_path / "see.png")])
    printed = capsys.readouterr().out
    assert "p=0.3 of 0.3, step 12 of LinearSchedule(steps=12)" in printed
    assert f"accuracy with DropBlock: {result['with DropBlock']:.1%}" in printed
    assert result["dropped"] == pytest.approx(0.3, abs=0.02)
    with Image.open(tmp_path / "see.png") as picture:
        assert picture.size == (1200, 880)


def test_how_it_works_draws_the_pictures_of_the_pages(tmp_path: Path) -> None:
    committed = ROOT / "docs" / "pictures"
    load(ROOT / "examples" / "how_it_works.py").main(["--out", str(tmp_path)])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in committed.iterdir())
    assert all(0.5 < path.stat().st_size / (committed / path.name).stat().st_size < 2 for path in tmp_path.iterdir())
    assert all(path.stat().st_size < 400_000 for path in committed.iterdir())

"""The gallery matches the output of `examples/gallery.py`; every tutorial runs as a plain script and prints what its text says."""

import re
import runpy
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hookdrop
from hookdrop.core.parts import REGULARIZERS
from tests.support.programs import ROOT, load

PAGE = (ROOT / "docs" / "gallery.md").read_text()

for _needed in ("pytorch_grad_cam", "sklearn", "timm", "torchvision"):
    pytest.importorskip(_needed)
matplotlib = pytest.importorskip("matplotlib")
plt = pytest.importorskip("matplotlib.pyplot")


@pytest.fixture(scope="module")
def gallery() -> Any:
    return load(ROOT / "examples" / "gallery.py")


def test_linked_figures_exist_and_are_small() -> None:
    linked = re.findall(r"\]\((gallery/[\w-]+\.png)\)", PAGE)
    assert {f"gallery/{path.name}" for path in (ROOT / "docs" / "gallery").glob("*.png")} == set(linked)
    assert all((ROOT / "docs" / path).stat().st_size < 80_000 for path in linked)


def test_page_shows_every_regularizer_and_schedule(gallery: Any) -> None:
    headings = set(re.findall(r"^### (.*)$", PAGE, re.MULTILINE))
    named = {name for heading in headings for name in heading.split(", ")}
    assert set(REGULARIZERS) <= named
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


TUTORIALS = ROOT / "examples" / "tutorials"


@pytest.fixture(autouse=True)
def figures(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    shown: list[Any] = []

    def show() -> None:
        shown.extend(map(plt.figure, plt.get_fignums()))
        plt.close("all")

    backend = matplotlib.get_backend()
    plt.switch_backend("agg")
    monkeypatch.setattr(plt, "show", show)
    yield shown
    plt.close("all")
    plt.switch_backend(backend)


@pytest.fixture
def run(figures: list[Any], capsys: pytest.CaptureFixture[str]) -> Any:
    def run(name: str, count: int) -> tuple[dict[str, Any], str]:
        variables = runpy.run_path(str(TUTORIALS / f"{name}.py"))
        assert len(figures) == count
        assert not plt.get_fignums(), "a figure is not shown"
        for figure in figures:
            assert figure.get_suptitle(), "the title is the alternative text"
            assert figure.get_figwidth() * figure.get_dpi() <= 800
        return variables, capsys.readouterr().out

    return run


def number(pattern: str, printed: str) -> float:
    found = re.search(pattern, printed)
    assert found, printed
    return float(found[1])


def test_masks(run: Any) -> None:
    variables, _ = run("plot_masks", 7)
    measured = variables["measured"]
    assert measured["hookdrop"] == pytest.approx([0.1] * 7, abs=0.008)
    assert max(measured["torchvision"][1:]) < 0.1
    assert min(measured["timm"]) > 0.1
    assert measured["timm"][0] > 0.9


def test_schedules(run: Any) -> None:
    _, printed = run("plot_schedules", 5)
    assert "[0.0, 0.5, 1.0, 1.0]" in printed
    assert "p=0.2 of 0.2, step 80 of LinearSchedule(steps=60)" in printed
    assert number(r"after the ramp: requested 0\.200, dropped ([\d.]+)", printed) == pytest.approx(0.2, abs=0.01)
    assert "its schedule is not advancing, because nothing calls step(), seek() or follow()" in printed
    assert printed.endswith("p=0.1 of 0.2, step 30 of LinearSchedule(steps=60)>\n")


def test_finetune(run: Any) -> None:
    variables, printed = run("plot_finetune", 2)
    assert "50 training images, 300 test images" in printed
    assert "eval output bit-identical with and without hooks" in printed
    losses = {}
    for name, of_arm in variables["runs"].items():
        assert all(accuracies[0] < 0.5 < accuracies[-1] for _, _, accuracies in of_arm)
        losses[name] = [sum(values[-20:]) for _, values, _ in of_arm]
    assert losses["at the ends of branches"] == pytest.approx(losses["without"], rel=0.15)
    assert all(b > 1.5 * a for a, b in zip(losses["without"], losses["at the outputs of blocks"], strict=True))
    assert "same predictions: True" in printed


def test_mc_dropout(run: Any) -> None:
    _, printed = run("plot_mc_dropout", 3)
    right, wrong = (number(rf"mean entropy of {name} predictions: ([\d.]+)", printed) for name in ("right", "wrong"))
    assert right < wrong
    sampled, once = (number(rf"AUROC for errors, {of}: ([\d.]+)", printed) for of in ("20 samples", "one prediction"))
    assert min(sampled, once) > 0.7
    assert sampled == pytest.approx(once, abs=0.05)
    assert "state_dict unchanged after sampling: True" in printed
    assert "prediction unchanged after sampling: True" in printed
    assert "state_dict unchanged after a forward in train mode: False" in printed


def test_observe(run: Any) -> None:
    variables, printed = run("plot_observe", 4)
    assert "p=0.3 of 0.3, step 200 of LinearSchedule(steps=200)" in printed
    assert set(variables["health"]) == {f"block{block}.{layer}" for block in (1, 2, 3) for layer in range(3)}
    assert variables["recorded"]["block3"].dropped == pytest.approx(0.3, abs=0.02)
    assert "mean image area with Grad-CAM above half of its maximum" in printed


def test_the_site_lists_every_tutorial() -> None:
    listed = re.search(r"for name in \((.*)\)\]$", (ROOT / "docs" / "conf.py").read_text(), re.M)
    assert listed
    paths = TUTORIALS.glob("*.py")
    assert {f"plot_{name}" for name in re.findall(r'"(\w+)"', listed[1])} == {path.stem for path in paths}

"""End-to-end tests of compare.py: a small comparison from command line to report, resuming, and invalid requests."""

import contextlib
import io
import re
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import compare
from comparison.analysis.schema import ArmSummary, Summary, without_commas
from comparison.analysis.text import interval_text
from comparison.engines.store import Store
from comparison.report.table import row
from comparison.run.record import Record
from comparison.spec.config import validate
from tests.support.programs import ROOT

BENCHMARKS = ROOT / "benchmarks"
TINY = """
title: A tiny comparison
models:
  name: resnet10t
  kwargs: {channels: [16, 24, 32, 48], stem_width: 8, output_stride: 8}
data: {name: digits, train_size: 40, validation_size: 40}
layers: "layer*.*.bn2"
arms:
  - DropBlock(p=0.1, block_size=3)
  - {peer: "timm.DropPath(drop_prob=0.1)"}
seeds: 2
epochs: 2
timing: 0.1
tuning: {seeds: 1, space: {p: [0.1, 0.3], weight_decay: [0.1]}, space_none: {weight_decay: [0.01, 0.1]}}
"""

ARMS = ["none", "DropBlock", "timm.DropPath (equal p)", "none (other seeds)", "p = 0 (A/A)"]
TRIALS, FINALS = 2 * 2, 5 * 2


def run(*words: object) -> tuple[int, str]:
    """Run compare.py and return its exit status and output."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = compare.main([str(word) for word in words])
    return status, printed.getvalue()


def records(out: Path) -> dict[str, Record]:
    """All records in the store of a folder."""
    return Store(out / "runs").records()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A finished comparison with two trials for two arms, and five arms with two seeds."""
    folder = tmp_path_factory.mktemp("compare")
    config, out = folder / "tiny.yaml", folder / "out"
    config.write_text(TINY)
    status, text = run("--config", config, "--out", out, "--workers", 1)
    return SimpleNamespace(status=status, text=text, config=config, out=out)


@pytest.fixture
def copied(tiny: SimpleNamespace, tmp_path: Path) -> Path:
    """A copy of the folder of the comparison, which a test may modify."""
    return Path(shutil.copytree(tiny.out, tmp_path / "copied"))


class TestSmallComparison:
    def test_summary_has_all_arms_and_seeds_valid_controls_and_costs(self, tiny: SimpleNamespace) -> None:
        assert tiny.status == 0, tiny.text
        assert tiny.text.rstrip().endswith(f"Report: {tiny.out / 'report.html'}")
        assert (tiny.out / "report.html").stat().st_size > 10_000
        (cell,) = Summary.model_validate_json((tiny.out / "summary.json").read_text()).cells
        assert [arm.name for arm in cell.arms] == ARMS
        assert {tuple(arm.seeds) for arm in cell.arms} == {(0, 1)}
        controls = cell.controls
        assert (controls.aa_equal, controls.aa_seeds, controls.paired) == (2, 2, True)
        assert controls.unchanged == controls.hooked == 6
        assert controls.none_none is not None
        assert all(arm.time and arm.memory for arm in cell.arms)

    def test_a_dry_run_trains_nothing(self, tiny: SimpleNamespace, tmp_path: Path) -> None:
        status, text = run("--config", tiny.config, "--out", tmp_path / "dry", "--workers", 3, "--dry-run")
        assert status == 0
        assert f"final runs: {FINALS} to train; 0 in the store" in text
        assert "No difference can be significant at 5 %: use `seeds: 7` or more." in text
        assert re.search(
            r"\d+ training images, \d+ optimizer steps, \d+ test images: one of these is [\d.]+ points", text
        )
        assert not records(tmp_path / "dry")

    def test_after_an_interruption_only_missing_runs_are_trained(self, tiny: SimpleNamespace, copied: Path) -> None:
        """Files of finished runs are left alone, so that no run is trained twice."""
        files = {path: path.stat().st_mtime_ns for path in (copied / "runs").glob("*.npz")}
        lost = next(path for path in files if records(copied)[path.stem].spec["stage"] == "final")
        lost.unlink()
        assert run("--config", tiny.config, "--out", copied, "--workers", 1)[0] == 0
        again = {path: path.stat().st_mtime_ns for path in (copied / "runs").glob("*.npz")}
        assert len(again) == TRIALS + FINALS
        assert {path for path, changed in again.items() if changed != files[path]} == {lost}

    def test_check_trains_the_first_seed_again_and_counts_what_differs(self, tiny: SimpleNamespace) -> None:
        changed = Summary.model_validate_json((tiny.out / "summary.json").read_text())
        changed.cells[0].arms[1].values["nll"][0] += 1e-9
        (tiny.out.parent / "changed.json").write_text(changed.model_dump_json())
        for path, differ in ((tiny.out / "summary.json", 0), (tiny.out.parent / "changed.json", 1)):
            out = tiny.out.parent / "check"
            status, text = run("--config", tiny.config, "--out", out, "--workers", 1, "--check", path)
            assert (status, f"{differ} results differ" in text, len(records(out))) == (differ, True, len(ARMS))
        with pytest.raises(SystemExit):  # the runs would be compared with themselves
            run("--config", tiny.config, "--out", tiny.out, "--check", tiny.out / "summary.json")


class TestInvalidRequests:
    def error(self, tmp_path: Path, text: str, *words: object, status: int = 2) -> str:
        config = tmp_path / "mine.yaml"
        config.write_text(text)
        found, printed = run("--config", config, "--out", tmp_path / "out", "--workers", 1, *words)
        assert (found, "Nothing was trained." in printed) == (status, True)
        assert not (tmp_path / "out" / "runs").exists() or not records(tmp_path / "out")
        return printed

    @pytest.mark.parametrize(
        ("old", "new", "said"),
        [
            ("name: resnet10t", "name: resnet10", "resnet10 on digits: no model is named 'resnet10'"),
            ("train_size: 40", "train_size: 4000", "train_size=4000 is out of range"),
            ("DropBlock(p=0.1, block_size=3)", "TokenDropout(p=0.1)", "TokenDropout"),
            ("title: A", "title: [A", "mine.yaml: invalid YAML: "),
        ],
    )  # fmt: skip
    def test_errors_are_reported_before_training(self, tmp_path: Path, old: str, new: str, said: str) -> None:
        assert old in TINY
        assert said in self.error(tmp_path, TINY.replace(old, new, 1))

    def test_all_errors_of_cells_are_reported_together(self, tmp_path: Path) -> None:
        wrong = TINY.replace("layer*.*.bn2", "layer5.*").replace("drop_prob=0.1)", 'drop_prob=0.1)", layers: "nose')
        text = self.error(tmp_path, wrong)
        assert all(f"{arm} on resnet10t on digits: " in text for arm in ("DropBlock", "timm.DropPath (equal p)"))
        assert text.count("Nothing was trained.") == 1

    def test_files_that_cannot_be_used(self, tiny: SimpleNamespace, tmp_path: Path) -> None:
        status, text = run("--config", BENCHMARKS / "configs" / "digit.yaml", "--out", tmp_path)
        assert (status, "did you mean" in text, "digits.yaml" in text) == (2, True, True)
        (tmp_path / "out").write_text("a file")
        status, text = run("--config", tiny.config, "--out", tmp_path / "out", "--workers", 1)
        assert (status, f"--out: cannot write to {tmp_path / 'out'}" in text) == (2, True)

    def test_a_changed_comparison_is_rejected(self, tiny: SimpleNamespace, copied: Path) -> None:
        (more := copied / "more.yaml").write_text(TINY.replace("seeds: 2", "seeds: 3"))
        status, text = run("--config", more, "--out", copied, "--workers", 1)
        assert (status, "seeds: stored 2, requested 3" in text) == (2, True)


class TestReadme:
    TEXT = (BENCHMARKS / "README.md").read_text()

    def test_the_yaml_example_is_valid(self) -> None:
        (block,) = re.findall(r"```yaml\n(.*?)```", self.TEXT, re.DOTALL)
        config = validate(yaml.safe_load(block), "README.md")
        assert [arm.kind for arm in config.all_arms()] == ["regularizer", "recipe", "peer", "peer", "probe"]

    def test_every_command_parses(self) -> None:
        shell = re.findall(r"benchmarks/compare\.py ((?:\\\n|[^`\n])+)", self.TEXT)
        assert len(shell) > 6
        for words in shell:
            compare.parse(shlex.split(words.replace("\\\n", " "), comments=True))


def settings(text: str) -> dict[str, object]:
    """The settings of a config, without titles and names: like comments, they do not affect the results."""
    found = {name: value for name, value in yaml.safe_load(text).items() if name != "title"}
    for arm in found["arms"]:
        if isinstance(arm, dict) and "name" in arm:
            arm["name"] = without_commas(arm["name"])
    return found


def differences(found: Summary) -> list[str]:
    """The rows of a table of the differences from none in accuracy; a column for each cell."""
    arms = [
        [arm for arm in cell.arms if arm.against_none and arm.values != cell.arms[0].values] for cell in found.cells
    ]
    return [f"| {row[0].name} | {' | '.join(map(difference, row))} |" for row in zip(*arms, strict=True)]


def difference(arm: ArmSummary) -> str:
    """The difference from none, bold if it is significant after Holm's correction."""
    found = arm.against_none["accuracy"]
    bold = "**" if found.p_holm <= 0.05 and arm.kind not in ("control", "reference") else ""
    return f"{bold}{interval_text(found, 'accuracy')}{bold}"


@pytest.mark.parametrize("name", ["digits", "synthetic", "finetune", "finetune_scratch", "finetune_schedules"])
def test_match_the_shipped_config_and_the_documented_tables(name: str) -> None:
    found = Summary.model_validate_json((BENCHMARKS / "results" / name / "summary.json").read_text())
    assert settings(found.config) == settings((BENCHMARKS / "configs" / f"{name}.yaml").read_text())
    assert found.seeds >= 16
    assert not found.failures
    assert all(cell.controls.hold and cell.controls.aa_equal == found.seeds for cell in found.cells)
    page = "finetuning" if name.startswith("finetune") else "results"
    text = (BENCHMARKS.parent / "docs" / "evidence" / f"{page}.md").read_text()
    if page == "finetuning":
        rows = [*differences(found), *(f"{cell.arms[0].means['accuracy']:.2f} %" for cell in found.cells)]
        assert len(rows) > 4
        assert [row for row in rows if row not in text] == []
    else:
        shown = [[cell.replace("\n", " ") for cell in row(arm)] for arm in found.cells[0].arms]
        rows = [f"| {' | '.join(cells)} |" for name, *rest in shown for cells in ([name, *rest[:6]], [name, *rest[6:]])]
        assert [row for row in rows if row not in text] == []

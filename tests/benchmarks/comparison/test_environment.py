"""The environment of a run, and the progress display."""

from __future__ import annotations

import getpass
import json
import os
import platform
import socket
import subprocess
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

pytest.importorskip("pydantic")
pytest.importorskip("rich")
from rich.console import Console

import hookdrop
from comparison.engines.store import Store
from comparison.report import progress
from comparison.run.environment import determinism, environment, revision, versions
from comparison.run.record import Failure, Record
from tests.support.programs import ROOT


def leaves(value: object) -> list[object]:
    return [leaf for each in value.values() for leaf in leaves(each)] if isinstance(value, dict) else [value]


class TestEnvironment:
    def test_versions_of_installed_packages(self) -> None:
        found = environment()["versions"]
        assert found["python"] == platform.python_version()
        assert found["torch"] == torch.__version__
        assert found["hookdrop"] == hookdrop.__version__
        assert found["numpy"] == version("numpy")
        assert {"torchvision", "timm", "scikit-learn", "optuna"} < set(found)

    def test_version_of_a_missing_package_is_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("comparison.run.environment.PACKAGES", ("numpy", "no-such-package"))
        assert versions()["no-such-package"] is None
        assert versions()["numpy"] == version("numpy")

    def test_environment_is_strict_json_with_one_level_of_nesting(self) -> None:
        found = environment()
        assert json.loads(json.dumps(found, allow_nan=False)) == found
        assert not any(isinstance(leaf, list) for leaf in leaves(found))
        assert all(not isinstance(leaf, dict) for part in found.values() for leaf in part.values())

    def test_environment_has_no_host_user_or_path(self) -> None:
        texts = [leaf for leaf in leaves(environment()) if isinstance(leaf, str)]
        private = {socket.gethostname(), getpass.getuser(), str(Path.home()), str(ROOT)}
        assert not private & set(texts)
        assert not any(os.sep in text and Path(text).is_absolute() for text in texts)

    def test_hardware_matches_the_machine(self) -> None:
        found = environment()["hardware"]
        assert found["cpu_count"] == os.cpu_count()
        assert found["cpu"]
        assert 0.1 < found["memory_gib"] < 1e5
        assert (found["gpus"] == "none") is not torch.cuda.is_available()

    def test_determinism_settings_are_current(self) -> None:
        before = determinism()
        assert before["threads"] == torch.get_num_threads()
        torch.use_deterministic_algorithms(True)
        torch.set_float32_matmul_precision("high")
        try:
            now = environment()["determinism"]
        finally:
            torch.use_deterministic_algorithms(False)
            torch.set_float32_matmul_precision("highest")
        assert (before["deterministic_algorithms"], now["deterministic_algorithms"]) == (False, True)
        assert (before["float32_matmul_precision"], now["float32_matmul_precision"]) == ("highest", "high")


class TestRevision:
    @pytest.fixture
    def checkout(self, tmp_path: Path) -> Path:
        def git(*arguments: str) -> None:
            me = ["-c", "user.name=a", "-c", "user.email=a@b"]
            subprocess.run(["git", "-C", str(tmp_path), *me, *arguments], check=True, capture_output=True)

        try:
            git("init")
        except OSError:
            pytest.skip("git is not installed")
        for folder in ("hookdrop", "benchmarks"):
            (tmp_path / folder).mkdir()
            (tmp_path / folder / "code.py").touch()
        git("add", ".")
        git("commit", "-m", "first")
        return tmp_path

    def test_revision_is_the_current_commit(self, checkout: Path) -> None:
        head = subprocess.check_output(["git", "-C", str(checkout), "rev-parse", "HEAD"], text=True).strip()
        assert revision(checkout) == {"revision": head, "dirty": False}

    @pytest.mark.parametrize(
        ("name", "dirty"),
        [("hookdrop/code.py", True), ("benchmarks/new.py", True), ("runs/results.json", False), ("notes.txt", False)],
    )
    def test_dirty_only_if_the_code_was_changed(self, checkout: Path, name: str, dirty: bool) -> None:
        (checkout / name).parent.mkdir(exist_ok=True)
        (checkout / name).write_text("changed")
        assert revision(checkout)["dirty"] is dirty

    def test_revision_is_none_outside_of_the_repository(self, checkout: Path, tmp_path: Path) -> None:
        none = {"revision": None, "dirty": None}
        (checkout / "installed").mkdir()
        assert revision(checkout / "installed") == none
        assert revision(Path("/")) == none
        assert revision(tmp_path / "nowhere") == none

    def test_revision_is_none_without_git(self, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "")
        assert revision(checkout) == {"revision": None, "dirty": None}

    def test_revision_ignores_git_environment_variables(self, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GIT_DIR", "/nowhere")
        assert revision(checkout)["revision"] is not None


GOOD, BAD = Record("a", {}), Record("b", {}, failure=Failure("nan", "the loss is NaN"))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "runs") as opened:
        yield opened


class TestProgress:
    @pytest.mark.parametrize(("total", "lines"), [(1, [1]), (3, [1, 2, 3]), (20, list(range(2, 21, 2)))])
    def test_a_pipe_gets_a_line_for_every_10_percent(
        self, store: Store, capsys: pytest.CaptureFixture[str], total: int, lines: list[int]
    ) -> None:
        with progress.watch(Console(width=200), total, store) as advance:
            for _ in range(total):
                advance(GOOD)
        said = capsys.readouterr().out.splitlines()
        assert [int(text.split()[0]) for text in said] == lines
        assert all(f" of {total} runs after " in text for text in said)

    def test_a_line_shows_failures_and_the_time_left(self) -> None:
        assert progress.line(30, 100, 0, 60) == "30 of 100 runs after 60 s, about 2 min left"
        assert progress.line(50, 100, 2, 9000) == "50 of 100 runs (2 failed) after 2.5 h, about 2.5 h left"
        assert progress.line(100, 100, 1, 3 * 86400) == "100 of 100 runs (1 failed) after 3.0 days"

    def test_a_pipe_shows_failures(self, store: Store, capsys: pytest.CaptureFixture[str]) -> None:
        with progress.watch(Console(width=200), 2, store) as advance:
            advance(BAD)
            advance(GOOD)
        assert capsys.readouterr().out.count("(1 failed)") == 2

    def test_a_terminal_shows_a_bar_and_a_line_for_each_active_run(
        self, store: Store, capsys: pytest.CaptureFixture[str]
    ) -> None:
        store.beat("c", 7, 10, 0.123456, "resnet18 on digits: DropBlock [3], seed 4")
        store.beat("d", 8, 10, float("nan"), "none, seed 5")
        with progress.watch(Console(width=100, force_terminal=True, color_system=None), 3, store) as advance:
            advance(GOOD)
            advance(BAD)
        shown = capsys.readouterr().out
        assert "2/3 runs (1 failed)" in shown
        assert "resnet18 on digits: DropBlock [3], seed 4: step 7 of 10, loss 0.1235" in shown
        assert "none, seed 5: step 8 of 10" in shown
        assert "step 8 of 10, loss" not in shown

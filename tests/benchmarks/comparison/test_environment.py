"""The environment of a run, and the progress display."""

from __future__ import annotations

import getpass
import io
import json
import os
import socket
import subprocess
from pathlib import Path

import pytest
import torch
from rich.console import Console

from comparison.report import table
from comparison.run.record import Failure, Record, environment, revision
from tests.support.programs import ROOT


class TestEnvironment:
    def test_it_is_strict_json_with_one_level_of_nesting(self) -> None:
        found = environment()
        assert json.loads(json.dumps(found, allow_nan=False)) == found
        assert not any(isinstance(leaf, dict | list) for part in found.values() for leaf in part.values())
        assert found["versions"]["torch"] == torch.__version__
        assert found["determinism"]["threads"] == torch.get_num_threads()
        assert found["hardware"]["cpu"]

    def test_it_has_no_host_user_or_path(self) -> None:
        texts = {leaf for part in environment().values() for leaf in part.values() if isinstance(leaf, str)}
        assert not {socket.gethostname(), getpass.getuser(), str(Path.home()), str(ROOT)} & texts
        assert not any(os.sep in text and Path(text).is_absolute() for text in texts)


class TestRevision:
    @pytest.fixture
    def checkout(self, tmp_path: Path) -> Path:
        def git(*arguments: str) -> None:
            me = ["-c", "user.name=a", "-c", "user.email=a@b"]
            subprocess.run(["git", "-C", str(tmp_path), *me, *arguments], check=True, capture_output=True)

        git("init")
        (tmp_path / "hookdrop").mkdir()
        (tmp_path / "hookdrop" / "a.py").write_text("a = 1\n")
        git("add", ".")
        git("commit", "-m", "First")
        return tmp_path

    def test_the_commit_and_whether_the_code_was_changed(self, checkout: Path) -> None:
        clean = revision(checkout)
        assert len(clean["revision"]) == 40
        assert clean["dirty"] is False
        (checkout / "notes.txt").touch()
        assert revision(checkout) == clean
        (checkout / "hookdrop" / "a.py").write_text("a = 2\n")
        assert revision(checkout) == {**clean, "dirty": True}

    def test_a_folder_that_is_not_the_root_of_a_checkout_has_no_revision(self, checkout: Path) -> None:
        assert revision(checkout / "hookdrop") == {"revision": None, "dirty": None}


class TestProgress:
    RECORDS = [Record(str(i), {}, failure=Failure("nan", "") if i == 3 else None) for i in range(20)]

    def progress(self, **settings: bool) -> str:
        out = io.StringIO()
        with table.watch(Console(file=out, width=100, **settings), 20, "Final runs") as advance:
            for record in self.RECORDS:
                advance(record)
        return out.getvalue()

    def test_a_pipe_gets_ten_lines(self) -> None:
        first, *lines = self.progress().splitlines()
        assert first == "Final runs: 20 runs"
        assert [line.split(" runs")[0] for line in lines] == [f"{n} of 20" for n in range(2, 21, 2)]
        assert "(1 failed)" in lines[-1]

    def test_a_terminal_gets_a_bar(self) -> None:
        assert "100%" in self.progress(force_terminal=True)

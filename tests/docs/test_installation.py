"""`.ci/install` ends each failure with one sentence that says what to do, and continues after an interruption."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.programs import ROOT

# Stands in for Python and, in .venv, for Python with pip. What it does is set by environment variables.
STUB = """#!/usr/bin/env bash
case "$*" in
    *version_info*) exit "${OLD:-0}" ;;
    "-m venv .venv") [ -n "${VENV_ERROR:-}" ] && { echo "$VENV_ERROR"; exit 1; }
        mkdir -p .venv/bin; cp "$0" .venv/bin/python; echo made >> log ;;
    "-m pip --version") exit 0 ;;
    "-m pip install"*) echo "${@: -1}" >> log; [ -n "${PIP_ERROR:-}" ] && { echo "$PIP_ERROR" >&2; exit 1; }; exit 0 ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "install", tmp_path / ".ci")
    (tmp_path / "python").write_text(STUB)
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def install(checkout: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHON": str(checkout / "python")} | settings
    return subprocess.run([".ci/install", "compare"], cwd=checkout, env=env, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"OLD": "1"}, r"hookdrop needs Python 3.11 or newer"),
        ({"PYTHON": "no-such-python"}, r"'no-such-python' is not: run 'make PYTHON="),
        ({"VENV_ERROR": "Error: No space left on device"}, r"The disk is full"),
        ({"VENV_ERROR": "ensurepip is not available"}, r"apt install python3-venv"),
        ({"PIP_ERROR": "OSError: [Errno 28] No space left on device"}, r"The disk is full"),
        ({"PIP_ERROR": "Temporary failure in name resolution"}, r"No package index can be reached: check the network"),
        ({"PIP_ERROR": "something else"}, r"pip could not install hookdrop\[compare\]: .*'make clean'"),
    ],
    ids=["old Python", "no Python", "full disk", "no venv module", "full disk in pip", "no network", "another error"],
)
def test_a_failure_says_what_to_do(checkout: Path, settings: dict[str, str], sentence: str) -> None:
    done = install(checkout, **settings)
    assert done.returncode == 1
    assert re.search(sentence, done.stderr.strip().splitlines()[-1]), done.stderr


def test_an_interrupted_installation_continues_and_an_incomplete_environment_is_created_again(checkout: Path) -> None:
    (checkout / ".venv" / "bin").mkdir(parents=True)
    (checkout / ".venv" / "bin" / "python").write_text("#!/bin/sh\nexit 1\n")
    (checkout / ".venv" / "bin" / "python").chmod(0o755)
    assert install(checkout, PIP_ERROR="killed").returncode == 1
    assert install(checkout).returncode == 0
    assert (checkout / "log").read_text().split() == ["made", ".[compare]", ".[compare]"]

"""The environment of a run, and the progress display."""

from __future__ import annotations

import getpass
import json
import re
from pathlib import Path

import pytest
import torch

from comparison.report import table
from comparison.run.record import Failure, Record, environment
from tests.support.programs import ROOT


def test_the_environment_is_json_without_host_user_or_path() -> None:
    found = environment()
    text = json.dumps(found, allow_nan=False)
    assert json.loads(text) == found
    assert found["versions"]["torch"] == torch.__version__
    assert found["cpu"]
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?|", found["git"])
    assert not any(private in text for private in (f'"{getpass.getuser()}"', str(Path.home()), str(ROOT)))


class TestProgress:
    RECORDS = [Record(str(i), {}, failure=Failure("nan", "") if i == 3 else None) for i in range(20)]

    def test_there_are_ten_lines(self, capsys: pytest.CaptureFixture[str]) -> None:
        advance = table.progress(20, "Final runs")
        for record in self.RECORDS:
            advance(record)
        first, *lines = capsys.readouterr().out.splitlines()
        assert first == "Final runs: 20 runs"
        assert [line.split(" runs")[0] for line in lines] == [f"{n} of 20" for n in range(2, 21, 2)]
        assert "(1 failed)" in lines[-1]

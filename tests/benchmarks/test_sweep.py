"""`benchmarks/sweep.py` and `report.py`: limits, shards, how a run resumes, and the report."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("timm")
pytest.importorskip("rich")
pytest.importorskip("pebble")
pytest.importorskip("resource")
import report
import sweep
from models.check import CheckFailed, NotRunnable
from report import Sweep
from tests.benchmarks import sweep_cases
from tests.support.programs import ROOT

ABOUT = Sweep("cases", "All cases", "python cases.py")
NAMES = ("passes", "fails", "crashes", "hangs", "passes too")
RESULTS = ROOT / "benchmarks" / "results"


def run(out: Path, *arguments: str, check: sweep.Check = sweep_cases.check) -> int:
    parser = sweep.parser("", out="unused", memory=8.0)
    return sweep.main(parser.parse_args(["--out", str(out), *arguments]), ABOUT, NAMES, check)


def statuses(out: Path) -> dict[str, str]:
    return {one["name"]: one["status"] for one in json.loads((out / "cases.json").read_text())["models"]}


def test_crashes_and_timeouts_do_not_end_a_run(tmp_path: Path) -> None:
    assert run(tmp_path, "--timeout", "30", "--only", "passes|fails|crashes") == 1
    assert run(tmp_path, "--timeout", "1", "--only", "hangs") == 1
    assert statuses(tmp_path) == dict(
        zip(NAMES, ("passed", "failed", "crashed", "not run", "passed"), strict=True)
    )  # in the order of the names
    page = (tmp_path / "cases.md").read_text()
    assert "| fails | ValueError: first line second line |" in page
    assert "| crashes | the process ended with exit status 3 |" in page
    assert "| hangs | not finished after 1 s |" in page


def test_interrupted_run_resumes_with_the_next_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inside = ("--workers", "0", "--only", "passes|fails")
    run(tmp_path, "--workers", "0", "--only", "^passes$")
    journal = tmp_path / "cases-1-of-1.jsonl"
    first = journal.read_text()
    journal.write_text(first + '{"name": "fails", "stat')  # killed while writing
    assert run(tmp_path, *inside) == 1
    assert "3 names, 1 done" in capsys.readouterr().out
    assert list(statuses(tmp_path).values()) == ["passed", "failed", "passed"]
    assert run(tmp_path, *inside, "--again", "failed", check=lambda *given: {"status": "passed"}) == 0
    assert set(statuses(tmp_path).values()) == {"passed"}


def test_shards_partition_the_names_and_merge(tmp_path: Path) -> None:
    for shard in ("1/2", "2/2"):
        run(tmp_path / shard[0], "--workers", "0", "--shard", shard, check=lambda *given: {"status": "passed"})
    folders = [str(tmp_path / part) for part in "12"]
    assert run(tmp_path, "--report", *folders, "--hardware", "a machine") == 0
    assert list(statuses(tmp_path)) == list(NAMES)
    assert "on a machine;" in (tmp_path / "cases.md").read_text()


@pytest.mark.parametrize("wrong", ["--shard=0/2", "--shard=3/2", "--shard=2", "--shard=a/b", "--only=["])
def test_invalid_options_are_rejected(wrong: str) -> None:
    with pytest.raises(SystemExit):
        sweep.parser("", out="unused").parse_args([wrong])


@pytest.mark.parametrize(
    ("error", "status"), [(CheckFailed("a"), "failed"), (NotRunnable("a"), "not run"), (KeyError("a"), "failed")]
)
def test_errors_become_records(error: Exception, status: str) -> None:
    def check(name: str, options: argparse.Namespace) -> dict[str, Any]:
        raise error

    (record,) = sweep.run(["one"], check, argparse.Namespace(workers=0))
    assert (record["name"], record["status"]) == ("one", status)
    assert "a" in record["error"]
    assert str(ROOT) not in record.get("traceback", "")


class TestReport:
    RECORDS = (
        {"name": "timm:a", "family": "x", "status": "passed", "sites": {"Dropout": 2}, "asked": 0.1, "dropped": 0.098}
        | {"elements": 3000, "warnings": {"w|w": 1}},
        {"name": "timm:b", "family": "x", "status": "passed", "sites": {"Dropout": 1}, "asked": 0.1, "dropped": 0.102}
        | {"elements": 1000, "finite": False},
        {"name": "timm:c", "family": "y", "status": "meta", "error": "needs a|b"},
    )

    def test_page_has_totals_rates_reasons_and_families(self) -> None:
        head = {"hardware": "a machine", "versions": {"python": "3"}}
        page = report.markdown(ABOUT, {**head, "models": self.RECORDS})
        for text in (
            "timm: 2 of 3 models (66.7%) passed; 1 meta.",
            "Sites: 3 Dropout.",
            "of each of 2 models dropped 9.9000% of 4,000 elements; the requested rate is 10.0000%.",
            "1 models return NaN",
            "| w\\|w | 1 |",
            "| timm:c | needs a\\|b |",
            "| x | 2 | 2 | 0 |",
        ):
            assert text in page

    @pytest.mark.parametrize(
        "path", sorted(RESULTS.glob("transformers/*.json")) + sorted(RESULTS.glob("zoo/**/*.json"))
    )
    def test_committed_reports_can_be_read(self, path: Path) -> None:
        found = json.loads(path.read_text())
        names = [record["name"] for record in found["models"]]
        assert len(names) == len(set(names))
        assert {record["status"] for record in found["models"]} <= set(report.STATUSES)
        assert [one["name"] for one in report.records([path])] == names
        without = [r["name"] for r in found["models"] if r["status"] not in ("passed", "batch", "no layers")]
        assert [r["name"] for r in found["models"] if r["name"] in without and not r.get("error")] == []

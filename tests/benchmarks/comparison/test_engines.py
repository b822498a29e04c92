"""The store of finished runs, and the engines: failures become records, and a kill loses only runs in progress."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from comparison.engines import work
from comparison.engines.store import Store, StoreError
from comparison.engines.work import Runner
from comparison.run.record import Failure, Record
from comparison.spec.run_spec import Run
from tests.support.comparison_jobs import job, record_of, run_of, runs_of, starts
from tests.support.programs import ROOT

ENV = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
NAN = Failure("nan", "the loss is NaN")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    (tmp_path / "runs").mkdir()
    return Store(tmp_path / "runs")


def train(runs: list[Run], store: Store, workers: int = 1) -> dict[str, Record]:
    """Train with the local engine until nothing is missing, as the comparison does."""
    trainer = Runner(store, partial(work.train, workers=workers))
    return dict(trainer.ensure(runs, ""))


@pytest.fixture(autouse=True)
def jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(work, "execute", partial(job, tmp_path))


def until(what: Callable[[], bool]) -> None:
    for _ in range(6000):
        if what():
            return
        time.sleep(0.01)
    raise AssertionError("the condition was not met in time")


class TestStore:
    def test_records_round_trip(self, store: Store) -> None:
        done, failed = record_of(run_of(0)), Record("b", {"seed": 4}, failure=NAN, started="2031-01-01T00:00:00+00:00")
        for record in (done, failed):
            store.add(record)
        for record in (done, failed):
            again = Store(store.path).records()[record.key]
            assert {**vars(again), "images": 0} == {**vars(record), "images": 0}
            np.testing.assert_equal({**again.images}, {**record.images})

    def test_records_are_synced_before_they_appear(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        """A power failure after `add` does not lose the record: the file and the folder are synced."""
        seen: list[bool] = []
        monkeypatch.setattr(os, "fsync", lambda _: seen.append((store.path / "a.npz").exists()))
        store.add(Record("a", {}, failure=NAN))
        assert seen == [False, True]

    def test_a_damaged_file_is_named(self, store: Store) -> None:
        (store.path / "a.npz").write_bytes(b"PK\x03\x04 cut off")
        with pytest.raises(StoreError, match=r"cannot read .*a\.npz.*\n  delete the file"):
            store.records()


def test_failed_and_killed_runs_become_records_and_the_others_finish(tmp_path: Path, store: Store) -> None:
    runs = runs_of("good", "killed_once", "nan", "mistake", "doubt", "good", "store_full")
    found = train(runs, store)
    kinds = [failure.kind if (failure := found[run.key].failure) else "done" for run in runs]
    assert kinds == ["done", "done", "nan", "error", "error", "done", "error"]
    for run, message in ((runs[2], "FloatingPointError: the loss is nan at step 7"), (runs[3], "KeyError: 'layer9'")):
        record = found[run.key]
        assert record.failure
        assert record.failure.message.startswith(message)
        assert record.failure.message.endswith(f" in _{run.arm.name}")
        assert str(ROOT) not in record.failure.message
        assert (record.spec, record.done) == (run.model_dump(mode="json"), False)
    assert starts(tmp_path) == {run.key: 1 + (run.arm.name == "killed_once") for run in runs}
    # A record that does not fit on the disk is still reported.
    assert set(store.records()) == {run.key for run in runs[:-1]}
    doubt, good = found[runs[4].key].failure, found[runs[0].key].outcome
    assert doubt is not None
    assert doubt.message.startswith("HookdropWarning: the block covers its map")
    assert good is not None
    assert good["threads"] == 1  # type: ignore[typeddict-item]
    assert good["pid"] != os.getpid()  # type: ignore[typeddict-item]


class TestRunner:
    RUNS = runs_of("good", "mistake")

    @pytest.mark.parametrize(("kind", "trained"), [("nan", 0), ("error", 1), ("killed", 1)])
    def test_only_missing_and_failed_runs_are_trained(self, store: Store, kind: Any, trained: int) -> None:
        done, other = self.RUNS
        store.add(record_of(done))
        store.add(Record(other.key, other.model_dump(mode="json"), failure=Failure(kind, "earlier")))
        asked: list[Run] = []

        def engine(runs: Any, *_: object) -> Any:
            asked.extend(runs)
            return (record_of(run) for run in runs)

        trainer = Runner(store, engine)
        trainer.ensure(self.RUNS, "")
        assert asked == [other] * trained
        assert set(trainer.requested) == {run.key for run in self.RUNS}


DRIVER = """
import sys
from pathlib import Path
from tests.benchmarks.comparison.test_engines import Store, partial, train, work
from tests.support.comparison_jobs import job, runs_of

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    work.execute = partial(job, folder)
    train(runs_of("good", "good", "held", "good"), Store(folder / "runs"))
"""


def test_a_killed_driver_resumes_without_losing_or_repeating_runs(tmp_path: Path, store: Store) -> None:
    (tmp_path / "driver.py").write_text(DRIVER)
    command = [sys.executable, str(tmp_path / "driver.py"), str(tmp_path)]
    first = subprocess.Popen(command, env=ENV)
    until(lambda: bool(list(tmp_path.glob("pid *"))))
    first.send_signal(signal.SIGKILL)
    first.wait()
    # The worker ends with its parent.
    (mark,) = tmp_path.glob("pid *")
    until(lambda: not Path("/proc", mark.name.split()[1]).exists())
    finished = set(store.records())
    assert len(finished) == 2
    subprocess.run(command, env=ENV, check=True, timeout=240)
    assert len(store.records()) == 4
    assert all(record.done for record in store.records().values())
    assert sorted(starts(tmp_path).values()) == [1, 1, 1, 2]
    assert all(starts(tmp_path)[key] == 1 for key in finished)

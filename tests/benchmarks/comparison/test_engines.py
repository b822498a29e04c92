"""Engines: local processes, Ray and torchrun. Failures become records, and a kill loses at most one run."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("pydantic")
pytest.importorskip("pebble")
from comparison.engines.base import EngineError, label, throttled
from comparison.engines.guard import failure_of, guarded
from comparison.engines.local import LocalEngine
from comparison.engines.store import Store, StoreError
from comparison.engines.torchrun import TorchrunEngine
from comparison.run.record import Record
from tests.support.comparison_jobs import job, record_of, run_of, runs_of
from tests.support.programs import ROOT

ENV = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}


def still(step: int, steps: int, loss: float) -> None:
    """A progress callback that does nothing."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "runs") as opened:
        yield opened


def starts(store: Store) -> Counter[str]:
    return Counter(each.key for each in store.attempts())


def until(what: Callable[[], bool]) -> None:
    for _ in range(3000):
        if what():
            return
        time.sleep(0.01)
    raise AssertionError("the condition was not met in time")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class TestFailures:
    """Failed records of exceptions."""

    @pytest.mark.parametrize(
        ("arm", "kind", "message"),
        [
            ("nan", "nan", "FloatingPointError: the loss is nan at step 7"),
            ("nan_outcome", "nan", "not finite: nll"),
            ("memory", "memory", "RuntimeError: "),
            ("disk", "disk", "OSError: [Errno 28] No space left on device"),
            ("mistake", "error", "KeyError: 'layer9'"),
        ],
    )
    def test_an_exception_becomes_a_failed_record(self, tmp_path: Path, arm: str, kind: str, message: str) -> None:
        run = run_of(3, arm)
        record = guarded(job, run, still, tmp_path)
        assert record.failure is not None
        assert record.failure.kind == kind
        assert record.failure.message.startswith(message)
        assert (record.key, record.spec, record.done) == (run.key, run.model_dump(mode="json"), False)
        assert record.started
        assert record.environment["versions"]["torch"] == torch.__version__

    def test_the_traceback_has_no_absolute_paths(self, tmp_path: Path) -> None:
        failure = guarded(job, run_of(0, "mistake"), still, tmp_path).failure
        assert failure is not None
        assert failure.message.splitlines()[-1].startswith("  support/comparison_jobs.py:")
        assert failure.message.endswith(" in _mistake")
        assert str(ROOT) not in failure.message

    @pytest.mark.parametrize(
        ("error", "kind"),
        [
            (MemoryError(), "memory"),
            (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "memory"),
            (RuntimeError("MPS backend out of memory"), "memory"),
            (ValueError("out of memory of the past"), "error"),
            (OSError(12, "Cannot allocate memory"), "memory"),
            (OSError(122, "Disk quota exceeded"), "disk"),
            (OSError(2, "No such file"), "error"),
            (StoreError("no room", "disk"), "disk"),
            (StoreError("locked"), "error"),
            (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "), "killed"),
            (SystemExit(3), "error"),
        ],
    )
    def test_exceptions_are_classified(self, error: BaseException, kind: str) -> None:
        assert failure_of(error).kind == kind
        outer = ValueError("the run failed")
        outer.__cause__ = error
        assert failure_of(outer).kind == kind

    def test_a_checkpoint_that_cannot_be_written_is_a_disk_failure(self, tmp_path: Path) -> None:
        with pytest.raises(Exception) as caught:
            torch.save({"weights": torch.zeros(100_000)}, "/dev/full")
        assert failure_of(caught.value).kind == "disk"

    def test_keyboard_interrupt_is_not_caught(self, tmp_path: Path) -> None:
        def interrupted(*_: object) -> Record:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            guarded(interrupted, run_of(0), still, tmp_path)

    def test_records_are_returned_unless_they_are_not_finite(self, tmp_path: Path) -> None:
        record = record_of(run_of(0))
        assert guarded(lambda *_: record, run_of(0), still, tmp_path) is record
        wild = record_of(run_of(0))
        wild.images["nll"] = np.array([np.inf])  # type: ignore[index]
        failure = guarded(lambda *_: wild, run_of(0), still, tmp_path).failure
        assert failure is not None
        assert (failure.kind, failure.message) == ("nan", "not finite: images' nll")


class TestLocal:
    def test_failed_and_killed_runs_become_records_and_the_others_finish(self, tmp_path: Path, store: Store) -> None:
        runs = runs_of("good", "killed_once", "nan", "mistake", "doubt", "store_full", "killed", "good")
        # A failure on a device restarts the process, which also resets the resource limit of this run.
        runs[5] = runs[5].model_copy(update={"device": "cuda"})
        found = {record.key: record for record in LocalEngine(1).run(runs, job, store, tmp_path)}
        kinds = [failure.kind if (failure := found[run.key].failure) else "done" for run in runs]
        assert kinds == ["done", "done", "nan", "error", "error", "disk", "killed", "done"]
        assert len(found) == len(runs)
        assert sorted(store.records()) == sorted(found)
        assert starts(store) == Counter({run.key: 1 + run.arm.name.startswith("killed") for run in runs})
        doubt, full = found[runs[4].key].failure, found[runs[5].key].failure
        assert doubt is not None
        assert doubt.message.startswith("HookdropWarning: the block covers its map")
        assert full is not None
        assert "cannot grow" in full.message
        killed = found[runs[6].key].failure
        assert killed is not None
        assert "was killed by SIGKILL in each of 2 attempts" in killed.message
        assert "out-of-memory killer" in killed.message
        good: dict[str, object] = dict(found[runs[0].key].outcome or {})
        assert good["threads"] == 1
        assert good["pid"] != os.getpid()
        assert store.beats() == {}

    def test_finished_runs_are_not_trained_again(self, tmp_path: Path, store: Store) -> None:
        runs = runs_of("good", "mistake")
        for run in runs:
            store.add(record_of(run, pid=0))
        assert [record.done for record in LocalEngine(2).run(runs, job, store, tmp_path)] == [True, True]
        assert store.attempts() == []

    def test_closing_the_iterator_terminates_the_workers(self, tmp_path: Path, store: Store) -> None:
        records = LocalEngine(1).run(runs_of("good", "held"), job, store, tmp_path)
        next(records)
        until(lambda: len(list(tmp_path.glob("pid *"))) == 1)
        records.close()  # type: ignore[attr-defined]
        (pid,) = (int(mark.name.split()[1]) for mark in tmp_path.glob("pid *"))
        assert not alive(pid)

    def test_empty_list_of_runs(self, tmp_path: Path, store: Store) -> None:
        assert list(LocalEngine(2).run([], job, store, tmp_path)) == []

    @pytest.mark.parametrize("name", ["workers", "threads", "attempts"])
    def test_arguments_must_be_at_least_1(self, name: str) -> None:
        with pytest.raises(EngineError, match=f"{name} must be at least 1, got 0. Nothing was trained"):
            LocalEngine(**{"workers": 1, name: 0})


DRIVER = """
import sys
from pathlib import Path
from comparison.engines.local import LocalEngine
from comparison.engines.store import Lock, Store
from tests.support.comparison_jobs import job, runs_of

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    with Lock(folder / "lock"), Store(folder / "runs") as store:
        runs = runs_of("good", "slow", "good", "slow", "held", "good", "held", "slow", "good")
        missing = [run for run in runs if not (found := store.get(run.key)) or not found.done]
        for record in LocalEngine(2).run(missing, job, store, folder):
            print(record.key, flush=True)
"""


def test_a_killed_driver_resumes_without_losing_or_repeating_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-c", DRIVER, str(tmp_path)]
    (tmp_path / "driver.py").write_text(DRIVER)
    command = [sys.executable, str(tmp_path / "driver.py"), str(tmp_path)]
    first = subprocess.Popen(command, env=ENV, stdout=subprocess.DEVNULL)
    until(lambda: len(list(tmp_path.glob("pid *"))) == 2)
    with Store(tmp_path / "runs") as store:
        first.send_signal(signal.SIGKILL)
        first.wait()
        finished = set(store.records())
        assert len(finished) == 5
        pids = [int(mark.name.split()[1]) for mark in tmp_path.glob("pid *")]
        until(lambda: not any(map(alive, pids)))
        assert set(store.records()) == finished
        again = subprocess.run(command, env=ENV, check=True, capture_output=True, text=True)
        runs = runs_of("good", "slow", "good", "slow", "held", "good", "held", "slow", "good")
        assert {run.key for run in runs} == set(store.records())
        assert all(record.done for record in store.records().values())
        assert sorted(again.stdout.split()) == sorted({run.key for run in runs} - finished)
        assert starts(store) == Counter({run.key: 1 + (run.arm.name == "held") for run in runs})
        assert store.beats() == {}


def test_throttled_limits_the_rate_of_progress_updates() -> None:
    heard: list[int] = []
    for seconds in (3600.0, 0.0):
        beat = throttled(lambda step, steps, loss: heard.append(step), seconds)
        for step in range(4):
            beat(step, 4, 0.5)
    assert heard == [0, 0, 1, 2, 3]


def test_label_of_a_run() -> None:
    run = run_of(3, "DropBlock")
    assert label(run) == "resnet18 on digits, all images: DropBlock, seed 3"
    assert label(run.model_copy(update={"stage": "tuning"})).endswith("DropBlock, seed 3, tuning")
    assert pickle.loads(pickle.dumps(run)).key == run.key


class TestRay:
    @pytest.mark.filterwarnings("default")  # Ray emits ResourceWarning and FutureWarning
    def test_a_killed_ray_worker_is_replaced_and_only_its_run_is_retried(self, tmp_path: Path) -> None:
        pytest.importorskip("ray")
        program = tmp_path / "program.py"
        program.write_text(ON_RAY)
        done = subprocess.run([sys.executable, str(program), str(tmp_path)], env=ENV, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        runs = runs_of("good", "killed_once", "nan")
        with Store(tmp_path / "runs") as store:
            records = store.records()
            assert sorted(re.findall("^ENDED (.*)$", done.stdout, re.M)) == sorted(records)
            kinds = [failure.kind if (failure := records[run.key].failure) else "done" for run in runs]
            assert kinds == ["done", "done", "nan"]
            assert [starts(store)[run.key] for run in runs] == [1, 2, 1]
            good: dict[str, object] = dict(records[runs[0].key].outcome or {})
            assert (good["threads"], good["cwd"]) == (1, os.getcwd())
            assert store.beats() == {}

    def test_an_unreachable_cluster_raises_before_training(self, tmp_path: Path, store: Store) -> None:
        pytest.importorskip("ray")
        from comparison.engines.ray import RayEngine

        with socket.create_server(("127.0.0.1", 0)) as nobody:
            port = nobody.getsockname()[1]
        with pytest.raises(
            EngineError, match=rf"cannot reach a Ray cluster at 127.0.0.1:{port}: (.|\n)*Nothing was trained\."
        ):
            next(RayEngine(f"127.0.0.1:{port}").run(runs_of("good"), job, store, tmp_path))
        assert store.attempts() == []
        store.add(record_of(runs_of("good")[0]))
        assert [record.done for record in RayEngine("127.0.0.1:1").run(runs_of("good"), job, store, tmp_path)] == [True]
        with pytest.raises(EngineError, match="workers must be at least 1, got 0"):
            RayEngine(workers=0)

    def test_missing_ray_raises_an_error_that_names_the_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from comparison.engines.ray import RayEngine

        monkeypatch.setitem(sys.modules, "ray", None)
        with pytest.raises(
            EngineError, match=r"Ray is not installed(.|\n)*hookdrop\[cluster\](.|\n)*Nothing was trained"
        ):
            RayEngine()


ON_RAY = """
import sys
from pathlib import Path
from comparison.engines.ray import RayEngine
from comparison.engines.store import Store
from tests.support.comparison_jobs import job, runs_of

folder = Path(sys.argv[1])
with Store(folder / "runs") as store:
    runs = runs_of("good", "killed_once", "nan")
    for record in RayEngine(workers=1, attempts=2).run(runs, job, store, folder / "scratch"):
        assert store.get(record.key)
        print("ENDED", record.key)
"""


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of two ranks that ran `tests/integration/distributed/programs/walk.py`."""
    folder = tmp_path_factory.mktemp("walk")
    program = ROOT / "tests" / "integration" / "distributed" / "programs" / "walk.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(program)]
    done = subprocess.run([*command, str(folder)], env=ENV, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return folder


class TestTorchrun:
    def test_all_ranks_share_each_run_and_get_the_record_of_rank_0(self, walked: Path) -> None:
        first, second = (json.loads((walked / f"rank{rank}.json").read_text()) for rank in (0, 1))
        assert first == second
        assert [name for name, _, _ in first["first"]] == ["good", "fails 1", "late 0", "fails 0", "good"]
        for _, outcome, _ in (first["first"][0], first["first"][4], first["second"][0]):
            assert (outcome["total"], outcome["by"], outcome["backend"]) == (3.0, 0, "gloo")
        with Store(walked / "runs") as store:
            kept = store.records()
            assert sorted(each.spec["arm"]["name"] for each in kept.values()) == sorted(
                name for name, _, _ in first["first"] + first["second"]
            )
            assert set(starts(store).values()) == {1}
            assert store.beats() == {}
        assert first["initialized"] == [False]

    @pytest.mark.parametrize(("turn", "rank"), [(1, 1), (3, 0)])
    def test_a_failed_rank_fails_only_its_run(self, walked: Path, turn: int, rank: int) -> None:
        runs = json.loads((walked / "rank0.json").read_text())["first"]
        _, outcome, failure = runs[turn]
        assert outcome is None
        assert failure["kind"] == "nan"
        assert failure["message"].startswith(f"rank {rank}: FloatingPointError: the loss is nan")
        assert all(done for name, done, _ in runs if "fails" not in name)

    def test_a_run_for_another_number_of_ranks_raises(self, walked: Path) -> None:
        (text,) = json.loads((walked / "rank1.json").read_text())["refused"]
        assert "requires 3 ranks (`world`), but torchrun started 2." in text
        assert "--nproc-per-node=3" in text
        assert text.endswith("Nothing was trained.")

    def test_missing_torchrun_raises_an_error_with_the_command(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("RANK", raising=False)
        with pytest.raises(EngineError, match=r"requires torchrun(.|\n)*torchrun --nproc-per-node=2(.|\n)*Nothing was"):
            TorchrunEngine()

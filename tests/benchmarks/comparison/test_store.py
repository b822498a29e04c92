"""The store of finished runs: one record per run, despite concurrent writers and killed processes."""

from __future__ import annotations

import errno
import math
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pydantic")
pytest.importorskip("pebble")
from comparison.engines.store import Beat, Lock, Store, StoreError
from comparison.run.record import Failure, Record

IMAGES = {"correct": np.array([True, False]), "nll": np.array([0.25, 2.5], np.float32)}


NAN = Failure("nan", "the loss is NaN")


def done(key: str = "a", **changes: Any) -> Record:
    outcome: Any = {"accuracy": 91.5, "rates": [[0, 0.0]]}
    fields = {
        "spec": {"seed": 3},
        "outcome": outcome,
        "images": IMAGES,
        "environment": {"git": {"dirty": None}},
        "seconds": 1.5,
    }
    return Record(key, **(fields | changes))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out" / "runs"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with Store(path) as opened:
        yield opened


def same(a: Record | None, b: Record | None) -> bool:
    assert a is not None
    assert b is not None
    pixels = [{name: (array.dtype, array.tobytes()) for name, array in each.images.items()} for each in (a, b)]
    return pixels[0] == pixels[1] and {**vars(a), "images": 0} == {**vars(b), "images": 0}


class TestRecords:
    def test_records_round_trip(self, store: Store, path: Path) -> None:
        records = [done("a"), Record("b", {"seed": 4}, failure=NAN, started="2031-01-01T00:00:00+00:00")]
        assert [store.add(record) for record in records] == [True, True]
        with Store(path) as again:
            assert list(again.records()) == ["a", "b"]
            assert all(same(again.get(record.key), record) for record in records)

    def test_records_of_finished_runs_are_not_replaced(self, store: Store) -> None:
        first = done(seconds=1.0)
        assert store.add(first)
        assert not store.add(done(seconds=2.0))
        assert not store.add(Record("a", {}, failure=NAN))
        assert same(store.get("a"), first)

    def test_failed_records_are_replaced_by_the_next_attempt(self, store: Store) -> None:
        store.add(Record("a", {}, failure=NAN))
        assert store.add(Record("a", {}, failure=Failure("killed", "again")))
        assert store.records()["a"].failure == Failure("killed", "again")
        assert store.add(done())
        assert same(store.get("a"), done())

    def test_records_of_selected_runs(self, store: Store) -> None:
        for key in "abc":
            store.add(done(key))
        assert list(store.records(["c", "a", "nobody"])) == ["c", "a"]
        assert store.records([]) == {}
        assert store.get("nobody") is None

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_records_with_nan_or_infinity_raise(self, store: Store, value: float) -> None:
        with pytest.raises(
            ValueError, match=r"cannot store the outcome of run a: .*not JSON compliant.* Store a failure of kind 'nan'"
        ):
            store.add(done(outcome={"nll": value}))
        assert store.records() == {}

    def test_records_are_synced_before_they_appear(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        """A power failure after `add` does not lose the record: the file and the folder are synced."""
        seen: list[bool] = []
        monkeypatch.setattr(os, "fsync", lambda _: seen.append((store.path / "a.npz").exists()))
        store.add(done())
        assert seen == [False, True]

    @pytest.mark.parametrize("content", [b"", b"no zip", b"PK\x03\x04 cut off"])
    def test_an_unreadable_file_is_named(self, store: Store, content: bytes) -> None:
        (store.path / "a.npz").write_bytes(content)
        with pytest.raises(StoreError, match=r"cannot read .*a\.npz.*\n  delete the file"):
            store.records()


class TestAttemptsAndBeats:
    def test_attempts_are_logged_in_order(self, store: Store) -> None:
        for key, worker in (("b", "process 1"), ("a", "process 2"), ("b", "process 1")):
            store.attempt(key, worker)
        assert [(each.key, each.worker) for each in store.attempts()] == [
            ("b", "process 1"),
            ("a", "process 2"),
            ("b", "process 1"),
        ]

    def test_a_beat_is_deleted_when_its_run_ends_or_restarts(self, store: Store) -> None:
        for step in (1, 2):
            store.beat("a", step, 10, 0.5, "DropBlock, seed 3")
        store.beat("b", 7, 10, math.nan)
        assert store.beats() == {"a": Beat("DropBlock, seed 3", 2, 10, 0.5), "b": Beat("", 7, 10, None)}
        store.add(done("a"))
        store.attempt("b", "process 2")
        assert store.beats() == {}

    def test_forget_beats_deletes_all_beats(self, store: Store) -> None:
        store.beat("a", 1, 10, 0.5)
        store.forget_beats()
        assert store.beats() == {}


def write(store: Store, name: str, count: int) -> int:
    """Write records, half of them with keys that all processes share. Return how many were stored."""
    kept = 0
    for i in range(count):
        store.attempt(f"{name} {i}", name)
        kept += store.add(done(f"{name} {i}")) + store.add(done(f"both {i}", spec={"by": name}))
        store.beat("x", i, count, 0.1)
    return kept


class TestConcurrentWriters:
    def test_two_processes_store_one_record_per_run(self, store: Store) -> None:
        with ProcessPoolExecutor(2, get_context("spawn")) as pool:
            kept = [future.result() for future in [pool.submit(write, store, name, 60) for name in ("p", "q")]]
        assert sum(kept) == len(store.records()) == 180
        assert len(store.attempts()) == 120

    def test_a_killed_writer_leaves_no_partial_file(self, store: Store) -> None:
        code = f"""
import os, signal
from tests.benchmarks.comparison.test_store import Store, done
os.replace = os.link = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
Store({str(store.path)!r}).add(done())
"""
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        assert subprocess.run([sys.executable, "-c", code], env=env).returncode == -signal.SIGKILL
        assert store.records() == {}
        assert store.add(done())

    def test_a_full_disk_raises_and_writes_nothing(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(_: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(StoreError, match="cannot grow: .*The disk or quota is full") as raised:
            store.add(done())
        assert raised.value.kind == "disk"
        assert pickle.loads(pickle.dumps(raised.value)).kind == "disk"
        assert not list(store.path.glob("*.npz")) + list(store.path.glob(".*npz*"))


class TestFolder:
    def test_runs_of_an_older_version(self, path: Path) -> None:
        path.parent.mkdir()
        (path.parent / "runs.sqlite").touch()
        with pytest.raises(StoreError, match="has runs of an older version"):
            Store(path)

    def test_a_path_that_is_not_writable(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(StoreError, match=r"cannot open .* for writing: .*\n  choose a writable folder"):
            Store(tmp_path / "file" / "runs")

    def test_a_locked_folder_names_the_process(self, tmp_path: Path) -> None:
        with Lock(tmp_path / "lock"):
            with pytest.raises(
                StoreError, match=rf"in use by another comparison \(process {os.getpid()}\)\.\n(.|\n)*trained"
            ):
                Lock(tmp_path / "lock")
        with Lock(tmp_path / "lock"):
            assert (tmp_path / "lock").read_text() == str(os.getpid())

    def test_a_killed_process_releases_the_lock(self, tmp_path: Path) -> None:
        reader, writer = os.pipe()
        if not (pid := os.fork()):
            _held = Lock(tmp_path / "lock")
            os.write(writer, b"1")
            signal.pause()
        assert os.read(reader, 1) == b"1"
        os.close(reader)
        os.close(writer)
        with pytest.raises(StoreError, match=f"process {pid}\\)"):
            Lock(tmp_path / "lock")
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        Lock(tmp_path / "lock").release()

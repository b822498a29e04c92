"""The store of finished runs: one record per run, despite concurrent writers and killed processes."""

from __future__ import annotations

import json
import math
import os
import pickle
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pydantic")
pytest.importorskip("pebble")
from comparison.engines import database
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
    return tmp_path / "out" / "runs.sqlite"


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
        assert list(store.records(["c", "a", "nobody"])) == ["a", "c"]
        assert store.records([]) == {}
        assert store.get("nobody") is None

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_records_with_nan_or_infinity_raise(self, store: Store, value: float) -> None:
        with pytest.raises(
            ValueError, match=r"cannot store the outcome of run a: .*not JSON compliant.* Store a failure of kind 'nan'"
        ):
            store.add(done(outcome={"nll": value}))
        assert store.records() == {}

    def test_records_are_synced_to_disk(self, store: Store) -> None:
        """SQLite syncs at the end of the transaction, so a power failure does not lose records."""
        store.connection.set_trace_callback((said := []).append)  # type: ignore[func-returns-value]
        store.add(done())
        assert said[0] == "PRAGMA synchronous = FULL"
        assert store.connection.execute("PRAGMA synchronous").fetchone() == (2,)
        assert store.connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)

    def test_records_can_be_queried_with_sql_json(self, store: Store, path: Path) -> None:
        store.add(done())
        connection = sqlite3.connect(path)
        (row,) = connection.execute("SELECT json_extract(outcome, '$.accuracy') FROM records WHERE done")
        connection.close()
        assert row == (91.5,)


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
    store.close()
    return kept


class TestConcurrentWriters:
    def test_two_processes_store_one_record_per_run(self, store: Store) -> None:
        with ProcessPoolExecutor(2, get_context("spawn")) as pool:
            kept = [future.result() for future in [pool.submit(write, store, name, 60) for name in ("p", "q")]]
        assert sum(kept) == len(store.records()) == 180
        assert len(store.attempts()) == 120

    def test_each_thread_has_its_own_connection(self, store: Store) -> None:
        with ThreadPoolExecutor(4) as pool:
            kept = list(pool.map(lambda name: write(Store(store.path), name, 10), "pqrs"))
            assert len({*pool.map(lambda _: id(store.connection), range(40)), id(store.connection)}) > 1
        assert sum(kept) == len(store.records()) == 50

    def test_pickling_keeps_only_the_path(self, store: Store, path: Path) -> None:
        store.add(done())
        packed = pickle.dumps(store)
        assert len(packed) < 300
        with pickle.loads(packed) as again:
            assert list(again.records()) == ["a"]

    def test_a_forked_child_has_its_own_connection(self, store: Store) -> None:
        mine, (reader, writer) = store.connection, os.pipe()
        if not (pid := os.fork()):
            store.add(done("child"))
            os.write(writer, b"1" if store.connection is not mine else b"0")
            os._exit(0)
        os.waitpid(pid, 0)
        assert os.read(reader, 1) == b"1"
        os.close(reader)
        os.close(writer)
        assert list(store.records()) == ["child"]
        assert store.connection is mine

    def test_concurrent_processes_create_the_file_once(self, path: Path) -> None:
        program = f"from comparison.engines.store import Store\nStore({str(path)!r}).attempt('a', 'b')"
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        started = [subprocess.Popen([sys.executable, "-c", program], env=env) for _ in range(4)]
        assert [process.wait() for process in started] == [0] * 4
        with Store(path) as store:
            assert len(store.attempts()) == 4

    def test_a_killed_writer_leaves_no_partial_transaction(self, store: Store) -> None:
        if not (pid := os.fork()):
            with store.transaction() as connection:
                connection.execute("INSERT INTO attempts (key, worker, started) VALUES ('a', 'b', '')")
                os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(pid, 0)
        assert store.attempts() == []
        assert store.add(done())

    def test_an_interrupt_rolls_back_the_transaction(self, store: Store) -> None:
        with pytest.raises(KeyboardInterrupt):
            with store.transaction() as connection:
                connection.execute("INSERT INTO attempts (key, worker, started) VALUES ('a', 'b', '')")
                raise KeyboardInterrupt
        assert store.attempts() == []
        assert store.add(done())


class TestFullDisk:
    def test_a_full_disk_raises_and_writes_nothing(self, store: Store) -> None:
        store.add(done("a"))
        (pages,) = store.connection.execute("PRAGMA page_count").fetchone()
        store.connection.execute(f"PRAGMA max_page_count = {pages}")
        big = np.random.default_rng(0).random(100_000)
        store.beat("b", 1, 2, 0.5)
        with pytest.raises(StoreError, match=r"runs.sqlite cannot grow: .*full.*\n.*free some space") as caught:
            store.add(done("b", images={"nll": big}))
        assert caught.value.kind == "disk"
        assert list(store.records()) == ["a"]
        assert list(store.beats()) == ["b"]
        store.connection.execute("PRAGMA max_page_count = 100000")
        assert store.add(done("b", images={"nll": big}))

    def test_store_error_can_be_pickled(self) -> None:
        error = pickle.loads(pickle.dumps(StoreError("no room", "disk")))
        assert (str(error), error.kind) == ("no room", "disk")


def refused(path: Path, match: str) -> None:
    before = path.read_bytes()
    with pytest.raises(StoreError, match=match) as caught:
        Store(path)
    assert caught.value.kind == "error"
    assert path.read_bytes() == before


class TestIncompatibleFiles:
    def test_store_with_another_version(self, path: Path) -> None:
        with Store(path) as store:
            store.connection.execute("PRAGMA user_version = 7")
        refused(path, rf"version 7; .* version {database.VERSION}(.|\n)*--out, or use the version (.|\n)*trained")

    def test_database_of_another_program(self, tmp_path: Path) -> None:
        other = sqlite3.connect(tmp_path / "theirs.sqlite")
        other.execute("CREATE TABLE records (key TEXT)")
        other.close()
        refused(tmp_path / "theirs.sqlite", r"is the database of another program(.|\n)*--out(.|\n)*Nothing was trained")

    @pytest.mark.parametrize("length", [3, 5000])
    def test_file_that_is_not_a_database(self, tmp_path: Path, length: int) -> None:
        (tmp_path / "notes.txt").write_text("abc" * length)
        refused(tmp_path / "notes.txt", r"notes.txt is not a SQLite database(.|\n)*--out(.|\n)*Nothing was trained")

    @pytest.mark.parametrize("where", ["file/runs.sqlite", "file/deep/runs.sqlite", "folder"])
    def test_paths_that_are_not_writable(self, tmp_path: Path, where: str) -> None:
        (tmp_path / "file").touch()
        (tmp_path / "folder").mkdir()
        with pytest.raises(StoreError, match=r"cannot open .* for writing: .*\n.*--out"):
            Store(tmp_path / where)

    @pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc here")
    def test_folder_that_is_never_writable(self) -> None:
        for make in (Store, Lock):
            with pytest.raises(StoreError, match=r"cannot open /proc/nowhere/x for writing"):
                make("/proc/nowhere/x")


class TestLock:
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


def test_rows_are_strict_json(store: Store) -> None:
    store.add(done())
    (row,) = store.connection.execute("SELECT spec, outcome, environment FROM records")
    assert [json.loads(text, parse_constant=pytest.fail) for text in row] == [
        {"seed": 3},
        {"accuracy": 91.5, "rates": [[0, 0.0]]},
        {"git": {"dirty": None}},
    ]

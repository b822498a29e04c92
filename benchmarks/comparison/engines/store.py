"""One SQLite file of finished runs, attempts and the progress of runs under way; and the lock of its folder."""

from __future__ import annotations

import fcntl
import io
import json
import math
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from comparison.engines.database import Database, StoreError, unwritable
from comparison.run.record import Failure, Record

__all__ = ["Attempt", "Beat", "Lock", "Store", "StoreError"]

_TABLES = """
CREATE TABLE records (
    key TEXT PRIMARY KEY, done INTEGER NOT NULL, spec TEXT NOT NULL, outcome TEXT, images BLOB,
    kind TEXT, message TEXT, environment TEXT NOT NULL, started TEXT NOT NULL, seconds REAL NOT NULL
);
CREATE TABLE attempts (id INTEGER PRIMARY KEY, key TEXT NOT NULL, worker TEXT NOT NULL, started TEXT NOT NULL);
CREATE TABLE beats (
    key TEXT PRIMARY KEY, label TEXT NOT NULL, step INTEGER NOT NULL, steps INTEGER NOT NULL, loss REAL
);
"""
COLUMNS = ("key", "done", "spec", "outcome", "images", "kind", "message", "environment", "started", "seconds")
_NAMES = ", ".join(COLUMNS)


@dataclass(frozen=True)
class Attempt:
    """A run was started."""

    key: str
    worker: str
    """The process that started it."""
    started: str
    """ISO 8601, UTC."""


@dataclass(frozen=True)
class Beat:
    """How far a run has come that is going on."""

    label: str
    """For a person, as `DropBlock, seed 3`."""
    step: int
    steps: int
    loss: float | None
    """None if it is not a finite number."""


class Store(Database):
    """Records by the key of their run: one each, and what is done is never replaced.

    A record is on the disk (`synchronous=FULL`) when `add` returns: neither SIGKILL nor a power cut loses a finished
    run. The rest is written with NORMAL: a power cut may undo the last of it.

    Raises:
        StoreError: the file can't be made or written, is not a store, or is one of another version; it is unchanged.
    """

    tables = _TABLES

    def add(self, record: Record) -> bool:
        """Keep a record in one transaction; whether it was kept, which it is not if the run is done already.

        Raises:
            ValueError: the outcome holds a number that is not finite.
            StoreError: nothing was written.
        """
        row = row_of(record)
        with self.transaction("FULL") as connection:
            kept = connection.execute(
                f"INSERT INTO records ({_NAMES}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (key) DO UPDATE SET "
                + ", ".join(f"{name} = excluded.{name}" for name in COLUMNS[1:])
                + " WHERE NOT records.done",
                row,
            )
            connection.execute("DELETE FROM beats WHERE key = ?", (record.key,))
        return kept.rowcount == 1

    def get(self, key: str) -> Record | None:
        """The record of one run."""
        return self.records([key]).get(key)

    def records(self, keys: Iterable[str] | None = None) -> dict[str, Record]:
        """All records, or those of some runs, in the order in which the runs came in first."""
        chosen = "" if keys is None else " WHERE key IN (SELECT value FROM json_each(?))"
        values = () if keys is None else (json.dumps(list(keys)),)
        rows = self.read(f"SELECT {_NAMES} FROM records{chosen} ORDER BY rowid", values)
        return {row[0]: record_of(row) for row in rows}

    def attempt(self, key: str, worker: str) -> None:
        """Note that a worker starts a run."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        with self.transaction() as connection:
            connection.execute("INSERT INTO attempts (key, worker, started) VALUES (?, ?, ?)", (key, worker, now))
            connection.execute("DELETE FROM beats WHERE key = ?", (key,))

    def attempts(self) -> list[Attempt]:
        """All starts in their order."""
        return [Attempt(*row) for row in self.read("SELECT key, worker, started FROM attempts ORDER BY id")]

    def beat(self, key: str, step: int, steps: int, loss: float, label: str = "") -> None:
        """Say how far a run has come; it is forgotten when its record is added."""
        values = (key, label, step, steps, loss if math.isfinite(loss) else None)
        with self.transaction() as connection:
            connection.execute(
                "INSERT OR REPLACE INTO beats (key, label, step, steps, loss) VALUES (?, ?, ?, ?, ?)", values
            )

    def beats(self) -> dict[str, Beat]:
        """How far those runs are that are going on."""
        rows = self.read("SELECT key, label, step, steps, loss FROM beats ORDER BY rowid")
        return {key: Beat(*rest) for key, *rest in rows}

    def forget_beats(self) -> None:
        """Reset in-progress rows left by a killed process."""
        with self.transaction() as connection:
            connection.execute("DELETE FROM beats")


def row_of(record: Record) -> tuple[Any, ...]:
    """The values of `COLUMNS`; ValueError if one in the outcome is not finite."""
    try:
        outcome = None if record.outcome is None else _json(record.outcome)
    except ValueError as error:
        raise ValueError(f"the outcome of run {record.key} can't be kept: {error}. It is a failure: nan.") from error
    kind, message = (record.failure.kind, record.failure.message) if record.failure else (None, None)
    rest = (_pack(record.images), kind, message, _json(record.environment), record.started, record.seconds)
    return (record.key, record.done, _json(record.spec), outcome, *rest)


def record_of(row: tuple[Any, ...]) -> Record:
    """What `row_of` made a row of; tuples in the outcome come back as lists."""
    key, done, spec, outcome, images, kind, message, environment, started, seconds = row
    return Record(
        key=key,
        spec=json.loads(spec),
        outcome=None if outcome is None else json.loads(outcome),
        images=_unpack(images),
        failure=None if done else Failure(kind, message),
        environment=json.loads(environment),
        started=started,
        seconds=seconds,
    )


def _pack(images: Mapping[str, np.ndarray]) -> bytes | None:
    if not images:
        return None
    file = io.BytesIO()
    np.savez_compressed(file, allow_pickle=False, **images)
    return file.getvalue()


def _unpack(packed: bytes | None) -> dict[str, np.ndarray]:
    if packed is None:
        return {}
    with np.load(io.BytesIO(packed), allow_pickle=False) as arrays:
        return dict(arrays)


def _json(value: object) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


class Lock:
    """One comparison a folder: held until `release` or until the process ends, however it ends.

    Raises:
        StoreError: another process holds it, or the file can't be made.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        with ExitStack() as stack:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(open(self.path, "a+"))
            except OSError as error:
                raise StoreError(unwritable(self.path, str(error))) from error
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                file.seek(0)
                pid = file.read().strip() or "unknown"
                raise StoreError(
                    f"{self.path.parent} is in use by another comparison, process {pid}.\n"
                    "  wait for it or end it, or name another folder with --out.\nNothing was trained."
                ) from error
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            self._held = stack.pop_all()

    def release(self) -> None:
        """Let others in."""
        self._held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()

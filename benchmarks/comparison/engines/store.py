"""A SQLite file with finished runs, attempts and the progress of active runs, and the lock of its folder."""

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
    """A started run."""

    key: str
    worker: str
    """The process that trains it."""
    started: str
    """ISO 8601, UTC."""


@dataclass(frozen=True)
class Beat:
    """The progress of an active run."""

    label: str
    """Human-readable name, such as `DropBlock, seed 3`."""
    step: int
    steps: int
    loss: float | None
    """None if it is not finite."""


class Store(Database):
    """One record for each run; the record of a finished run is never replaced.

    Records are on disk (`synchronous=FULL`) when `add` returns: neither SIGKILL nor a power failure loses a finished
    run. Other rows use NORMAL: a power failure may undo the latest ones.

    Raises:
        StoreError: The file cannot be created or written, is not a store, or has another version. It is unchanged.
    """

    tables = _TABLES

    def add(self, record: Record) -> bool:
        """Store a record in one transaction. Return False, without a change, if the run is already done.

        Raises:
            ValueError: The outcome has a number that is not finite.
            StoreError: Nothing was written.
        """
        row = row_of(record)
        with self.transaction("FULL") as connection:
            inserted = connection.execute(
                f"INSERT INTO records ({_NAMES}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (key) DO UPDATE SET "
                + ", ".join(f"{name} = excluded.{name}" for name in COLUMNS[1:])
                + " WHERE NOT records.done",
                row,
            )
            connection.execute("DELETE FROM beats WHERE key = ?", (record.key,))
        return inserted.rowcount == 1

    def get(self, key: str) -> Record | None:
        """The record of one run."""
        return self.records([key]).get(key)

    def records(self, keys: Iterable[str] | None = None) -> dict[str, Record]:
        """All records, or those of the given runs, in order of their first insertion."""
        chosen = "" if keys is None else " WHERE key IN (SELECT value FROM json_each(?))"
        values = () if keys is None else (json.dumps(list(keys)),)
        rows = self.read(f"SELECT {_NAMES} FROM records{chosen} ORDER BY rowid", values)
        return {row[0]: record_of(row) for row in rows}

    def attempt(self, key: str, worker: str) -> None:
        """Record that a worker starts a run."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        with self.transaction() as connection:
            connection.execute("INSERT INTO attempts (key, worker, started) VALUES (?, ?, ?)", (key, worker, now))
            connection.execute("DELETE FROM beats WHERE key = ?", (key,))

    def attempts(self) -> list[Attempt]:
        """All attempts in order."""
        return [Attempt(*row) for row in self.read("SELECT key, worker, started FROM attempts ORDER BY id")]

    def beat(self, key: str, step: int, steps: int, loss: float, label: str = "") -> None:
        """Update the progress of a run; it is deleted when the run's record is added."""
        values = (key, label, step, steps, loss if math.isfinite(loss) else None)
        with self.transaction() as connection:
            connection.execute(
                "INSERT OR REPLACE INTO beats (key, label, step, steps, loss) VALUES (?, ?, ?, ?, ?)", values
            )

    def beats(self) -> dict[str, Beat]:
        """The progress of active runs."""
        rows = self.read("SELECT key, label, step, steps, loss FROM beats ORDER BY rowid")
        return {key: Beat(*rest) for key, *rest in rows}

    def forget_beats(self) -> None:
        """Reset in-progress rows left by a killed process."""
        with self.transaction() as connection:
            connection.execute("DELETE FROM beats")


def row_of(record: Record) -> tuple[Any, ...]:
    """The values of `COLUMNS`. Raises ValueError if the outcome has a number that is not finite."""
    try:
        outcome = None if record.outcome is None else _json(record.outcome)
    except ValueError as error:
        raise ValueError(
            f"cannot store the outcome of run {record.key}: {error}. Store a failure of kind 'nan' instead."
        ) from error
    kind, message = (record.failure.kind, record.failure.message) if record.failure else (None, None)
    rest = (_pack(record.images), kind, message, _json(record.environment), record.started, record.seconds)
    return (record.key, record.done, _json(record.spec), outcome, *rest)


def record_of(row: tuple[Any, ...]) -> Record:
    """The inverse of `row_of`; tuples in the outcome become lists."""
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
    """An exclusive lock on a folder, held until `release` or the end of the process.

    Raises:
        StoreError: Another process holds the lock, or the file cannot be created.
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
                    f"{self.path.parent} is in use by another comparison (process {pid}).\n"
                    "  wait for it, stop it, or choose another folder with --out.\nNothing was trained."
                ) from error
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            self._held = stack.pop_all()

    def release(self) -> None:
        """Release the lock."""
        self._held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()

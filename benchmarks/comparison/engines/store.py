"""A folder with an atomic file for each finished run, the attempts and the progress of active runs, and a lock."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import math
import os
import threading
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np

from comparison.run.record import Failure, Record

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class StoreError(Exception):
    """The store cannot be opened or written; `kind` is `disk` if the disk is full."""

    def __init__(self, message: str, kind: Literal["disk", "error"] = "error") -> None:
        super().__init__(message, kind)
        self.message, self.kind = message, kind

    def __str__(self) -> str:
        return self.message


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


class Store:
    """One file for each run, whose name is the run's key; the record of a finished run is never replaced.

    A file is on disk when `add` returns, and appears as a whole: neither SIGKILL nor a power failure loses a finished
    run or leaves half of one. Any number of processes can write.

    Raises:
        StoreError: The folder cannot be created or written, or holds runs of an older version. It is unchanged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self._beats, self._attempts = self.path / "active", self.path / "attempts.jsonl"
        if (old := self.path.parent / "runs.sqlite").exists():
            raise StoreError(
                f"{old} has runs of an older version, which this version cannot read.\n"
                "  choose another folder with --out.\nThe file is unchanged. Nothing was trained."
            )
        with self._translated_errors():
            self._beats.mkdir(parents=True, exist_ok=True)
            self._attempts.open("a").close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        return None

    def add(self, record: Record) -> bool:
        """Store a record. Return False, without a change, if the run is already done.

        Raises:
            ValueError: The record has a number that is not finite.
            StoreError: Nothing was written.
        """
        content, path = _pack(record), self._file(record.key)
        with self._translated_errors():
            stored = self._write(path, content, keep=True)
            if not stored and not self._read(path).done:
                stored = self._write(path, content)
            (self._beats / record.key).unlink(missing_ok=True)
        return stored

    def get(self, key: str) -> Record | None:
        """The record of one run."""
        return self.records([key]).get(key)

    def records(self, keys: Iterable[str] | None = None) -> dict[str, Record]:
        """All records in the order of their files' times, or those of the given runs."""
        with self._translated_errors():
            if keys is not None:
                paths = [path for path in map(self._file, keys) if path.exists()]
            else:
                paths = sorted(self.path.glob("*.npz"), key=lambda path: (path.stat().st_mtime_ns, path.name))
            return {path.stem: self._read(path) for path in paths}

    def attempt(self, key: str, worker: str) -> None:
        """Record that a worker starts a run."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        with self._translated_errors(), self._attempts.open("ab", buffering=0) as file:
            file.write(json.dumps(asdict(Attempt(key, worker, now))).encode() + b"\n")
            (self._beats / key).unlink(missing_ok=True)

    def attempts(self) -> list[Attempt]:
        """All attempts in order; lines that a full disk cut short are left out."""
        found = []
        for line in self._attempts.read_text().splitlines():
            with suppress(ValueError):
                found.append(Attempt(**json.loads(line)))
        return found

    def beat(self, key: str, step: int, steps: int, loss: float, label: str = "") -> None:
        """Update the progress of a run; it is deleted when the run's record is added."""
        beat = Beat(label, step, steps, loss if math.isfinite(loss) else None)
        with self._translated_errors():
            self._write(self._beats / key, json.dumps(asdict(beat)).encode(), sync=False)

    def beats(self) -> dict[str, Beat]:
        """The progress of active runs."""
        found = {}
        for path in sorted(self._beats.glob("[!.]*")):
            with suppress(OSError):  # the run has just ended
                found[path.name] = Beat(**json.loads(path.read_text()))
        return found

    def forget_beats(self) -> None:
        """Reset the progress of runs left by a killed process."""
        for path in self._beats.iterdir():
            path.unlink(missing_ok=True)

    def _file(self, key: str) -> Path:
        return self.path / f"{key}.npz"

    def _write(self, path: Path, content: bytes, keep: bool = False, sync: bool = True) -> bool:
        """Write a file atomically. With `keep`, return False if it exists."""
        partial = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            with partial.open("wb") as file:
                file.write(content)
                file.flush()
                if sync:
                    os.fsync(file.fileno())
            if keep:
                os.link(partial, path)
            else:
                os.replace(partial, path)
        except FileExistsError:
            return False
        finally:
            partial.unlink(missing_ok=True)
        if sync:
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        return True

    def _read(self, path: Path) -> Record:
        try:
            with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as arrays:
                images = dict(arrays)
            fields = json.loads(str(images.pop("record")))
        except (ValueError, KeyError, EOFError, OSError, zipfile.BadZipFile) as error:
            raise StoreError(
                f"cannot read {path}: {error}.\n  delete the file: the next start trains the run again.\n"
                "Stored runs are unchanged."
            ) from error
        failure = fields.pop("failure")
        return replace(Record(**fields), images=images, failure=failure and Failure(**failure))

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        """Raise errors of the file system as StoreError."""
        try:
            yield
        except OSError as error:
            if error.errno in DISK_FULL:
                raise StoreError(
                    f"{self.path} cannot grow: {error}. The disk or quota is full.\n"
                    "  free some space and run the same command again: the store is intact, only missing runs are "
                    "trained.",
                    "disk",
                ) from error
            raise StoreError(unwritable(self.path, str(error))) from error


def _pack(record: Record) -> bytes:
    """The file of a record. Raises ValueError if it has a number that is not finite."""
    fields: dict[str, Any] = {name: value for name, value in vars(record).items() if name != "images"}
    fields["failure"] = record.failure and asdict(record.failure)
    try:
        text = json.dumps(fields, allow_nan=False)
    except ValueError as error:
        raise ValueError(
            f"cannot store the outcome of run {record.key}: {error}. Store a failure of kind 'nan' instead."
        ) from error
    file = io.BytesIO()
    np.savez_compressed(file, allow_pickle=False, record=np.array(text), **record.images)
    return file.getvalue()


def unwritable(path: Path, reason: str) -> str:
    """The error message for a file that cannot be written."""
    return (
        f"cannot open {path} for writing: {reason}.\n  choose a writable folder with --out.\nStored runs are unchanged."
    )


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

"""A SQLite file with concurrent readers and writers."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, Self

VERSION = 1
"""Schema version: `PRAGMA user_version` of the file."""
APPLICATION = int.from_bytes(b"hkdp", "big")
"""`PRAGMA application_id` of the file."""
BUSY_SECONDS = 60.0


# The error codes of a full disk, an exceeded quota or a file size limit.
_DISK_FULL = (
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR_WRITE,
    sqlite3.SQLITE_IOERR_FSYNC,
    sqlite3.SQLITE_IOERR_TRUNCATE,
)
# Connections of the parent process must not be closed in a forked child.
_PARENT_CONNECTIONS: list[Any] = []


class StoreError(Exception):
    """The store cannot be opened or written; `kind` is `disk` if the disk is full."""

    def __init__(self, message: str, kind: Literal["disk", "error"] = "error") -> None:
        super().__init__(message, kind)
        self.message, self.kind = message, kind

    def __str__(self) -> str:
        return self.message


class Database:
    """A SQLite database, created with its tables if the file is new.

    Each process and thread uses its own connection. Only the path is pickled.

    Raises:
        StoreError: The file cannot be created or written, belongs to another program, or has another version. It is
            unchanged.
    """

    tables: ClassVar[str]

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self._start()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(unwritable(self.path, str(error))) from error
        self._check()

    def __getstate__(self) -> Path:
        return self.path

    def __setstate__(self, path: Path) -> None:
        self.path = path
        self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections of this process; the next use opens a new one."""
        if self._pid == os.getpid():
            for connection in self._connections:
                connection.close()
        self._start()

    @property
    def connection(self) -> sqlite3.Connection:
        """The connection of this thread, in autocommit mode."""
        if self._pid != os.getpid():
            _PARENT_CONNECTIONS.append((self._connections, self._local))
            self._start()
        try:
            found: sqlite3.Connection = self._local.connection
        except AttributeError:
            found = self._local.connection = self._open()
            self._connections.append(found)
        return found

    def _start(self) -> None:
        self._pid = os.getpid()
        self._local = threading.local()
        self._connections: list[sqlite3.Connection] = []

    def _open(self) -> sqlite3.Connection:
        with self._translated_errors():
            connection = sqlite3.connect(self.path, BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            with self._translated_errors():
                connection.execute("PRAGMA synchronous = NORMAL")
        except StoreError:
            connection.close()
            raise
        return connection

    def _check(self) -> None:
        """Create the tables of a new file; reject an incompatible file before changing it."""
        try:
            with self._translated_errors():
                if not self._has_tables():
                    self._create_tables()
                (mode,) = self.connection.execute("PRAGMA journal_mode = WAL").fetchone()
                # A file system without shared memory, such as a network file system, returns another mode.
                if mode != "wal":
                    raise StoreError(
                        f"{self.path} cannot use a write-ahead log: its file system (network?) has no shared memory.\n"
                        "  choose a folder on a local disk with --out.\nNothing was trained."
                    )
            with self.transaction():
                pass
        except StoreError:
            self.close()
            raise

    def _has_tables(self) -> bool:
        """Whether the file has the tables of this version; False for a new file."""
        (application,) = self.connection.execute("PRAGMA application_id").fetchone()
        (version,) = self.connection.execute("PRAGMA user_version").fetchone()
        (tables,) = self.connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if (application, version, tables) == (0, 0, 0):
            return False
        if application != APPLICATION:
            raise StoreError(
                f"{self.path} is the database of another program (application_id {application}).\n"
                "  choose another folder with --out.\nThe file is unchanged. Nothing was trained."
            )
        if version != VERSION:
            raise StoreError(
                f"{self.path} has store version {version}; this program requires version {VERSION}.\n"
                "  choose another folder with --out, or use the version of hookdrop's benchmarks that wrote it.\n"
                "The file is unchanged. Nothing was trained."
            )
        return True

    def _create_tables(self) -> None:
        with self.transaction("FULL") as connection:
            # Another process may have created them in the meantime.
            if not self._has_tables():
                for statement in self.tables.strip().split(";")[:-1]:
                    connection.execute(statement)
                connection.execute(f"PRAGMA application_id = {APPLICATION}")
                connection.execute(f"PRAGMA user_version = {VERSION}")

    def read(self, statement: str, values: tuple[Any, ...] = ()) -> list[Any]:
        """Run a query and return all rows."""
        with self._translated_errors():
            return self.connection.execute(statement, values).fetchall()

    @contextmanager
    def transaction(self, synchronous: Literal["NORMAL", "FULL"] = "NORMAL") -> Iterator[sqlite3.Connection]:
        """An atomic transaction. With NORMAL, a power failure may undo it, but SIGKILL cannot."""
        with self._translated_errors():
            connection = self.connection
            connection.execute(f"PRAGMA synchronous = {synchronous}")
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                # SQLite may have rolled back already.
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        """Raise SQLite errors as StoreError."""
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", None)
            if code in _DISK_FULL:
                raise StoreError(
                    f"{self.path} cannot grow: {error}. The disk or quota is full.\n"
                    "  free some space and run the same command again: the store is intact, only missing runs are "
                    "trained.",
                    "disk",
                ) from error
            if code == sqlite3.SQLITE_NOTADB:
                raise StoreError(
                    f"{self.path} is not a SQLite database.\n"
                    "  choose another folder with --out, or move the file.\nIt is unchanged. Nothing was trained."
                ) from error
            raise StoreError(unwritable(self.path, str(error))) from error


def unwritable(path: Path, reason: str) -> str:
    """The error message for a file that cannot be written."""
    return (
        f"cannot open {path} for writing: {reason}.\n  choose a writable folder with --out.\nStored runs are unchanged."
    )

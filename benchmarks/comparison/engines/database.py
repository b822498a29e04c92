"""A SQLite file that several processes read and write."""

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
"""Of the tables below; `PRAGMA user_version` of the file."""
APPLICATION = int.from_bytes(b"hkdp", "big")
"""`PRAGMA application_id` of the file."""
BUSY_SECONDS = 60.0


# What a full disk, an exceeded quota or a limit on the size of files comes as.
_FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_FSYNC, sqlite3.SQLITE_IOERR_TRUNCATE)
# SQLite's connections must not even be closed in a forked child.
_OF_THE_PARENT: list[Any] = []


class StoreError(Exception):
    """The store can't be opened or written; `kind` is `disk` if there is no room."""

    def __init__(self, message: str, kind: Literal["disk", "error"] = "error") -> None:
        super().__init__(message, kind)
        self.message, self.kind = message, kind

    def __str__(self) -> str:
        return self.message


class Database:
    """The file, with the tables that it has when it is new.

    Each process and each thread has a connection of its own; what is pickled is the path alone.

    Raises:
        StoreError: the file can't be made or written, is not ours, or is of another version; it is unchanged.
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
        """The thread's own, in autocommit mode."""
        if self._pid != os.getpid():
            _OF_THE_PARENT.append((self._connections, self._local))
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
        with self._teaching():
            connection = sqlite3.connect(self.path, BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            with self._teaching():
                connection.execute("PRAGMA synchronous = NORMAL")
        except StoreError:
            connection.close()
            raise
        return connection

    def _check(self) -> None:
        """Make the tables of a new file; refuse what is not ours before anything in it changes."""
        try:
            with self._teaching():
                if not self._known():
                    self._make_tables()
                (mode,) = self.connection.execute("PRAGMA journal_mode = WAL").fetchone()
                # A file system without shared memory, such as a network's, says what it has instead.
                if mode != "wal":
                    raise StoreError(
                        f"{self.path} can't have a write-ahead log: its file system (a network's?) can't share memory."
                        "\n  name a folder on a local disk with --out.\nNothing was trained."
                    )
            with self.transaction():
                pass
        except StoreError:
            self.close()
            raise

    def _known(self) -> bool:
        """Whether there are tables of this version; False for a new file."""
        (application,) = self.connection.execute("PRAGMA application_id").fetchone()
        (version,) = self.connection.execute("PRAGMA user_version").fetchone()
        (tables,) = self.connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if (application, version, tables) == (0, 0, 0):
            return False
        if application != APPLICATION:
            raise StoreError(
                f"{self.path} is a database of another program (application_id {application}).\n"
                "  name another folder with --out.\nThe file is unchanged. Nothing was trained."
            )
        if version != VERSION:
            raise StoreError(
                f"{self.path} is a store of version {version}; this program reads and writes version {VERSION}.\n"
                "  name another folder with --out, or go on with the version of hookdrop's benchmarks that wrote it.\n"
                "The file is unchanged. Nothing was trained."
            )
        return True

    def _make_tables(self) -> None:
        with self.transaction("FULL") as connection:
            # Another process may have been faster.
            if not self._known():
                for statement in self.tables.strip().split(";")[:-1]:
                    connection.execute(statement)
                connection.execute(f"PRAGMA application_id = {APPLICATION}")
                connection.execute(f"PRAGMA user_version = {VERSION}")

    def read(self, statement: str, values: tuple[Any, ...] = ()) -> list[Any]:
        """All rows of an answer."""
        with self._teaching():
            return self.connection.execute(statement, values).fetchall()

    @contextmanager
    def transaction(self, synchronous: Literal["NORMAL", "FULL"] = "NORMAL") -> Iterator[sqlite3.Connection]:
        """All or nothing. After NORMAL a power cut may undo it, but no SIGKILL."""
        with self._teaching():
            connection = self.connection
            connection.execute(f"PRAGMA synchronous = {synchronous}")
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                # SQLite may have rolled back by itself.
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    @contextmanager
    def _teaching(self) -> Iterator[None]:
        """SQLite's errors as StoreErrors."""
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", None)
            if code in _FULL:
                raise StoreError(
                    f"{self.path} can't grow: {error}. The disk or a quota is full.\n"
                    "  make room and start again: what is in the store is whole, and only what is missing is done.",
                    "disk",
                ) from error
            if code == sqlite3.SQLITE_NOTADB:
                raise StoreError(
                    f"{self.path} is no database.\n"
                    "  name another folder with --out, or move the file away.\nIt is unchanged. Nothing was trained."
                ) from error
            raise StoreError(unwritable(self.path, str(error))) from error


def unwritable(path: Path, why: str) -> str:
    """What to say of a file that can't be written."""
    return (
        f"{path} can't be opened and written: {why}.\n"
        "  name a folder with --out that can be written to.\nWhat was stored before is unchanged."
    )

"""A folder with one file for each finished run; the name of the file is the run's key."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from comparison.run.record import Failure, Record


class StoreError(Exception):
    """The folder cannot be used, or a file in it cannot be read."""


@dataclass(frozen=True)
class Store:
    """Any number of processes can add records. Files are only ever replaced as a whole."""

    path: Path

    def add(self, record: Record) -> None:
        """Store a record. It is on disk when this returns.

        Raises:
            OSError: The file cannot be written, for example because the disk is full. The store is unchanged.
            ValueError: The record has a number that is not finite.
        """
        fields: dict[str, Any] = {name: value for name, value in vars(record).items() if name != "images"}
        fields["failure"] = record.failure and asdict(record.failure)
        file = io.BytesIO()
        np.savez_compressed(
            file, allow_pickle=False, record=np.array(json.dumps(fields, allow_nan=False)), **record.images
        )
        replace_file(self._file(record.key), file.getvalue())

    def get(self, key: str) -> Record | None:
        """The record of one run."""
        return self.records([key]).get(key)

    def records(self, keys: Iterable[str] | None = None) -> dict[str, Record]:
        """All records by their keys, or those of the given runs.

        Raises:
            StoreError: A file is damaged.
        """
        paths = sorted(self.path.glob("[!.]*.npz")) if keys is None else map(self._file, keys)
        return {path.stem: _read(path) for path in paths if path.exists()}

    def _file(self, key: str) -> Path:
        return self.path / f"{key}.npz"


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file as a whole: neither SIGKILL nor a power failure leaves half of it, or loses it afterwards."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _read(path: Path) -> Record:
    try:
        # From memory, because NumPy leaves a damaged file open.
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

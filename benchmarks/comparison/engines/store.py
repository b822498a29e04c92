"""The output folder of a comparison, with one file for each finished run; the name of the file is the run's key."""

import io
import json
import os
import zipfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from textwrap import shorten

import numpy as np

from comparison.run.record import Failure, Record
from comparison.spec.config import Config
from comparison.spec.run_spec import ConfigError

# Settings that may change between sessions: they affect neither runs nor results.
_MAY_CHANGE = ("title", "timing")


class StoreError(Exception):
    """The folder cannot be used, or a file in it cannot be read."""


@dataclass(frozen=True)
class Store:
    """Any number of processes can add records. Files are only ever replaced as a whole."""

    path: Path

    def add(self, record: Record) -> None:
        """Store a record. It is on disk when this returns."""
        file, text = io.BytesIO(), json.dumps(asdict(replace(record, images={})), allow_nan=False)
        np.savez_compressed(file, allow_pickle=False, record=np.array(text), **record.images)
        replace_file(self._file(record.key), file.getvalue())

    def records(self, keys: Iterable[str] | None = None) -> dict[str, Record]:
        """All records by their keys, or those of the given runs."""
        paths = sorted(self.path.glob("[!.]*.npz")) if keys is None else map(self._file, keys)
        return {path.stem: _read(path) for path in paths if path.exists()}

    def _file(self, key: str) -> Path:
        return self.path / f"{key}.npz"


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


class Folder:
    def __init__(self, path: Path) -> None:
        self.path, self.store = path, Store(path.absolute() / "runs")
        self.report, self.summary, self._plan = map(path.joinpath, ("report.html", "summary.json", "comparison.json"))
        try:
            self.store.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"--out: cannot write to {path}: {error.strerror or error}.\n"
                "  choose another folder: --out runs/mine\nNothing was trained."
            ) from None

    def claim(self, config: Config) -> None:
        """Record the configuration before the first run, and reject another one.

        The configuration, including the number of seeds, is fixed in advance.
        """
        requested = {name: value for name, value in config.model_dump(mode="json").items() if name not in _MAY_CHANGE}
        stored = json.loads(self._plan.read_text())["config"] if self._plan.exists() else requested
        if changed := [name for name in requested if requested[name] != stored.get(name)]:
            both = {name: [shorten(json.dumps(of.get(name)), 200) for of in (stored, requested)] for name in changed}
            shown = "".join(f"  {name}: stored {old}, requested {new}\n" for name, (old, new) in both.items())
            raise ConfigError(
                f"{self.path} holds another comparison; its configuration was fixed before the first run:\n{shown}"
                "  use another folder: --out runs/other\nNothing was trained."
            )
        replace_file(self._plan, json.dumps({"config": requested}, indent=1).encode())

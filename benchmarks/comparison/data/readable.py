"""Which image files can be read; it is noted down, as the process of every run would have to read them all again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image


def unreadable(paths: Sequence[str], notes: Path) -> list[str]:
    """Those that are not whole images; files that `notes` knows and that have not changed since are not read again."""
    known = _noted(notes)
    found = {path: _looked_at(path, known.get(path)) for path in paths}
    if found != known:
        _note(notes, found)
    return [path for path in paths if not found[path][1]]


def notes_of(folder: Path, root: Path) -> Path:
    """Where in `root` it is noted which images of a folder can be read."""
    name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    return root / "readable" / f"{name}.json"


def readable(path: str) -> bool:
    """Whether the image is whole."""
    try:
        with Image.open(path) as image:
            image.verify()
        # A file that ends early passes the check of its structure.
        with Image.open(path) as image:
            image.load()
    # Whatever a decoder raises on what is no image: OSError, SyntaxError, ValueError, struct.error ...
    except Exception:
        return False
    return True


def _looked_at(path: str, known: Any) -> list[Any]:
    try:
        stat = os.stat(path)
    except OSError:
        return ["", False]
    version = f"{stat.st_size} bytes, changed at {stat.st_mtime_ns}"
    return known if known and known[0] == version else [version, readable(path)]


def _noted(notes: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(notes.read_text())
        return found if isinstance(found, dict) else {}
    return {}


def _note(notes: Path, found: dict[str, list[Any]]) -> None:
    # Where nothing can be written the next process reads the images again.
    with contextlib.suppress(OSError):
        notes.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=notes.parent, delete=False) as file:
            json.dump(found, file)
        os.replace(file.name, notes)

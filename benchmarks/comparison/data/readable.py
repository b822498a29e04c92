"""Check which image files are readable, with a cache that all processes share."""

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


def unreadable(paths: Sequence[str], cache: Path) -> list[str]:
    """The files that are not complete images. Files in the cache are not read again unless they changed."""
    known = _load_cache(cache)
    found = {path: _check(path, known.get(path)) for path in paths}
    if found != known:
        _save_cache(cache, found)
    return [path for path in paths if not found[path][1]]


def cache_path(folder: Path, root: Path) -> Path:
    """The cache file in `root` for the images of a folder."""
    name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    return root / "readable" / f"{name}.json"


def readable(path: str) -> bool:
    """Whether the file is a complete image."""
    try:
        with Image.open(path) as image:
            image.verify()
        # verify() does not detect truncated files.
        with Image.open(path) as image:
            image.load()
    # Decoders raise OSError, SyntaxError, ValueError, struct.error, ... on invalid files.
    except Exception:
        return False
    return True


def _check(path: str, known: Any) -> list[Any]:
    try:
        stat = os.stat(path)
    except OSError:
        return ["", False]
    version = f"{stat.st_size} bytes, changed at {stat.st_mtime_ns}"
    return known if known and known[0] == version else [version, readable(path)]


def _load_cache(cache: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(cache.read_text())
        return found if isinstance(found, dict) else {}
    return {}


def _save_cache(cache: Path, found: dict[str, list[Any]]) -> None:
    # If the cache cannot be written, the next process reads the images again.
    with contextlib.suppress(OSError):
        cache.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=cache.parent, delete=False) as file:
            json.dump(found, file)
        os.replace(file.name, cache)

"""The repository and its scripts, and code that runs in a new process."""

import fcntl
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def load(path: Path) -> ModuleType:
    """Import a script that is in no package, such as an example."""
    spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # `dataclass` looks up the module by name.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
    return module


def run_code(code: str, *flags: str, **settings: Any) -> str:
    """Run code in a new process, and return what it prints; if it fails, assert with its traceback."""
    done = subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, **settings)
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def locked_folder(factory: pytest.TempPathFactory, name: str) -> Iterator[Path]:
    """A folder shared by pytest-xdist's workers, for one of them at a time."""
    root = factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    (root / name).mkdir(exist_ok=True)
    with open(root / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield root / name

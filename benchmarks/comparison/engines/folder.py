"""The output folder of a comparison, used by one process at a time."""

from __future__ import annotations

import datetime
import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from comparison.engines.store import Lock, Store
from comparison.spec.config import Config
from comparison.spec.errors import ConfigError

# Settings that may change between sessions: they affect neither runs nor results.
_MAY_CHANGE = ("title", "timing")


def replace_text(path: Path, text: str) -> None:
    """Replace a file atomically."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


class Folder:
    """The folder with all files of a comparison."""

    def __init__(self, path: Path) -> None:
        """Create the folder if needed, and lock it.

        Raises:
            ConfigError: The folder cannot be written.
            StoreError: Another comparison uses the folder, or it holds runs of an older version.
        """
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            probe = path / f".writable-{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ConfigError(
                f"--out: cannot write to {path}: {error.strerror or error}.\n"
                "  choose another folder: --out runs/mine\nNothing was trained."
            ) from None
        self.report, self.summary = path / "report.html", path / "summary.json"
        self.costs, self.checkpoints = path / "costs.json", path / "checkpoints"
        self._plan = path / "comparison.json"
        with ExitStack() as held:
            try:
                held.enter_context(Lock(path / "lock"))
                self.store = held.enter_context(Store(path / "runs"))
            except OSError as error:
                raise ConfigError(f"--out: cannot write to {path}: {error}.\nNothing was trained.") from None
            self._held = held.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def claim(self, config: Config, amend: str | None) -> list[str]:
        """Claim the folder for this comparison, and record its configuration before the first run.

        The configuration, including the number of seeds, is fixed in advance. A changed configuration is rejected, or
        recorded with its reason as an amendment, which the report shows.

        Returns:
            All amendments.

        Raises:
            ConfigError: The folder holds another comparison.
        """
        requested = {name: value for name, value in config.model_dump(mode="json").items() if name not in _MAY_CHANGE}
        plan: dict[str, Any] = {"config": requested, "amendments": []}
        if self._plan.exists():
            plan = self._read()
        if plan["config"] != requested:
            changed = [name for name in requested if requested[name] != plan["config"].get(name)]
            if amend is None:
                raise ConfigError(_config_changed(self.path, changed, requested, plan["config"]))
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes")
            runs = len(self.store.records())
            plan["amendments"].append(f"{now}, after {runs} runs, {', '.join(changed)} changed: {amend}")
            plan["config"] = requested
        text = json.dumps(plan, indent=1)
        if not self._plan.exists() or self._plan.read_text() != text:
            replace_text(self._plan, text)
        return list(plan["amendments"])

    def _read(self) -> dict[str, Any]:
        try:
            plan = json.loads(self._plan.read_text())
            return {"config": dict(plan["config"]), "amendments": list(plan["amendments"])}
        except (OSError, ValueError, TypeError, KeyError):
            raise ConfigError(
                f"cannot read {self._plan}, so the comparison in this folder is unknown.\n"
                "  restore the file, or use another folder: --out runs/other\nNothing was trained."
            ) from None


def _config_changed(path: Path, changed: list[str], requested: dict[str, Any], stored: dict[str, Any]) -> str:
    shown = "\n".join(f"  {name}: {_difference(stored.get(name), requested[name])}" for name in changed)
    return (
        f"{path} holds another comparison; its configuration was fixed before the first run:\n{shown}\n"
        "  use another folder:                   --out runs/other\n"
        "  amend it (shown in the report):       --amend 'the reason'\nNothing was trained."
    )


def _difference(stored: Any, requested: Any) -> str:
    if not (isinstance(stored, list) and isinstance(requested, list)):
        return f"stored {_shortened(stored)}, requested {_shortened(requested)}"
    removed = [f"removed {_shortened(one)}" for one in stored if one not in requested]
    added = [f"added {_shortened(one)}" for one in requested if one not in stored]
    return ", ".join([*removed, *added]) or "reordered"


def _shortened(value: Any) -> str:
    if isinstance(value, dict):
        value = {name: part for name, part in value.items() if part is not None}
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."

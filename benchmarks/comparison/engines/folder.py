"""The output folder of a comparison, used by one process at a time."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from textwrap import shorten
from typing import Any, Self

from filelock import FileLock, Timeout

from comparison.engines.store import Store, StoreError, replace_file
from comparison.spec.config import Config
from comparison.spec.errors import ConfigError

# Settings that may change between sessions: they affect neither runs nor results.
_MAY_CHANGE = ("title", "timing")


class Folder:
    """The folder with all files of a comparison."""

    def __init__(self, path: Path) -> None:
        """Create the folder if needed, and lock it.

        Raises:
            ConfigError: The folder cannot be written.
            StoreError: Another comparison uses the folder.
        """
        self.path, self.store = path, Store(path.absolute() / "runs")
        self.report, self.summary = path / "report.html", path / "summary.json"
        self.costs, self.checkpoints = path / "costs.json", path / "checkpoints"
        self._plan, self._lock = path / "comparison.json", FileLock(path / "lock")
        try:
            self.store.path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(blocking=False)
        except Timeout:
            raise StoreError(
                f"{path} is in use by another comparison.\n"
                "  wait for it, stop it, or choose another folder with --out.\nNothing was trained."
            ) from None
        except OSError as error:
            raise ConfigError(
                f"--out: cannot write to {path}: {error.strerror or error}.\n"
                "  choose another folder: --out runs/mine\nNothing was trained."
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

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
        plan: dict[str, Any] = self._read() if self._plan.exists() else {"config": requested, "amendments": []}
        if changed := [name for name in requested if requested[name] != plan["config"].get(name)]:
            if amend is None:
                raise ConfigError(_config_changed(self.path, changed, requested, plan["config"]))
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes")
            runs = len(self.store.records())
            plan["amendments"].append(f"{now}, after {runs} runs, {', '.join(changed)} changed: {amend}")
            plan["config"] = requested
        replace_file(self._plan, json.dumps(plan, indent=1).encode())
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
    shown = "\n".join(
        f"  {name}: stored {shorten(json.dumps(stored.get(name)), 200)}, "
        f"requested {shorten(json.dumps(requested[name]), 200)}"
        for name in changed
    )
    return (
        f"{path} holds another comparison; its configuration was fixed before the first run:\n{shown}\n"
        "  use another folder:                   --out runs/other\n"
        "  amend it (shown in the report):       --amend 'the reason'\nNothing was trained."
    )

"""The output folder: one comparison, one driver at a time."""

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

# What changes no run and no claim.
_FREE = ("title", "timing")


def replace_text(path: Path, text: str) -> None:
    """Write a file, or leave the one that is there as it is."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


class Folder:
    """Where everything that a comparison leaves behind is."""

    def __init__(self, path: Path) -> None:
        """Make it if it isn't there.

        Raises:
            ConfigError: it can't be written.
            StoreError: another comparison is writing there, or its database is of another version.
        """
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            probe = path / f".writable-{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ConfigError(
                f"--out: can't write to {path}: {error.strerror or error}.\n  choose another folder: --out runs/mine\n"
                "Nothing was trained."
            ) from None
        self.report, self.summary = path / "report.html", path / "summary.json"
        self.costs, self.checkpoints = path / "costs.json", path / "checkpoints"
        self._plan = path / "comparison.json"
        with ExitStack() as held:
            try:
                held.enter_context(Lock(path / "lock"))
                self.store = held.enter_context(Store(path / "runs.sqlite"))
            except OSError as error:
                raise ConfigError(f"--out: can't write to {path}: {error}.\nNothing was trained.") from None
            self._held = held.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def claim(self, config: Config, amend: str | None) -> list[str]:
        """See that the folder belongs to this comparison, and write down what it is before its first run.

        What is compared, and over how many seeds, is fixed beforehand: another config is refused, or with a reason
        written down as an amendment, which the report shows.

        Returns:
            The amendments so far.

        Raises:
            ConfigError: the folder holds another comparison.
        """
        asked = {name: value for name, value in config.model_dump(mode="json").items() if name not in _FREE}
        plan: dict[str, Any] = {"config": asked, "amendments": []}
        if self._plan.exists():
            plan = self._read()
        if plan["config"] != asked:
            changed = [name for name in asked if asked[name] != plan["config"].get(name)]
            if amend is None:
                raise ConfigError(_differs(self.path, changed, asked, plan["config"]))
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes")
            runs = len(self.store.records())
            plan["amendments"].append(f"{now}, after {runs} runs, {', '.join(changed)} changed: {amend}")
            plan["config"] = asked
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
                f"{self._plan} can't be read, so what was compared in this folder is not known.\n"
                "  put the file back, or take another folder: --out runs/other\nNothing was trained."
            ) from None


def _differs(path: Path, changed: list[str], asked: dict[str, Any], there: dict[str, Any]) -> str:
    shown = "\n".join(f"  {name}: {_difference(there.get(name), asked[name])}" for name in changed)
    return (
        f"{path} holds another comparison, and what is compared is fixed before its first run:\n{shown}\n"
        "  another folder:        --out runs/other\n"
        "  change this one, which the report will say:  --amend 'the reason'\nNothing was trained."
    )


def _difference(there: Any, asked: Any) -> str:
    if not (isinstance(there, list) and isinstance(asked, list)):
        return f"{_short(there)} there, {_short(asked)} asked for"
    gone = [f"without {_short(one)}" for one in there if one not in asked]
    new = [f"with {_short(one)}" for one in asked if one not in there]
    return ", ".join([*gone, *new]) or "in another order"


def _short(value: Any) -> str:
    if isinstance(value, dict):
        value = {name: part for name, part in value.items() if part is not None}
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."

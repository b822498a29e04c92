"""A run's own checkpoint: interrupted and resumed, the run ends as if it had never stopped, bit for bit."""

from __future__ import annotations

import hashlib
import io
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from comparison.run import ranks
from comparison.run.run_setup import RunSetup

SECONDS = 20.0
"""Between checkpoints, at least."""
DIGEST = hashlib.sha256().digest_size


class Checkpoint:
    """The file of one run; with several processes, a file each."""

    def __init__(self, setup: RunSetup, folder: Path) -> None:
        """Nothing is written or read yet."""
        suffix = f".{ranks.rank()}" if setup.run.world > 1 else ""
        self._path = folder / f"{setup.run.key}{suffix}.pt"
        self._setup = setup
        self._last = time.monotonic()

    def due(self) -> bool:
        """Whether the last one is long enough ago; the first process decides for all."""
        return bool(ranks.agreed(self._setup.run, time.monotonic() - self._last >= SECONDS)[0])

    def save(self, epoch: int, history: Mapping[str, Any]) -> None:
        """Write the state after an epoch; a file that is there is replaced at once or not at all."""
        setup = self._setup
        state = {
            "epoch": epoch,
            "history": dict(history),
            "model": setup.model.state_dict(),
            "optimizer": setup.optimizer.state_dict(),
            "decay": setup.decay.state_dict(),
            "drop": setup.drop.state_dict() if setup.drop else None,
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state(setup.device) if setup.device.type == "cuda" else None,
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        content = io.BytesIO()
        torch.save(state, content)
        partial = self._path.with_suffix(".partial")
        partial.write_bytes(hashlib.sha256(content.getbuffer()).digest() + content.getbuffer())
        os.replace(partial, self._path)
        self._last = time.monotonic()

    def load(self) -> tuple[int, dict[str, Any]]:
        """Restore the state; the epochs that are done, and the history. (0, {}) if there is none."""
        state = self._read()
        epochs = ranks.agreed(self._setup.run, state["epoch"] if state else 0)
        if state is None or len(set(epochs)) > 1:
            return 0, {}
        setup = self._setup
        setup.model.load_state_dict(state["model"])
        setup.optimizer.load_state_dict(state["optimizer"])
        setup.decay.load_state_dict(state["decay"])
        if setup.drop:
            setup.drop.load_state_dict(state["drop"])
        torch.set_rng_state(state["rng"])
        if state["cuda_rng"] is not None:
            torch.cuda.set_rng_state(state["cuda_rng"], setup.device)
        return state["epoch"], state["history"]

    def _read(self) -> dict[str, Any] | None:
        """The state; None if there is none, or if its bytes are not those that were written: the run begins again."""
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return None
        if hashlib.sha256(content[DIGEST:]).digest() != content[:DIGEST]:
            return None
        state: dict[str, Any] = torch.load(io.BytesIO(content[DIGEST:]), weights_only=True, map_location="cpu")
        return state


def forget(folder: Path, key: str) -> None:
    """Remove what a run that is done and kept has left."""
    for path in folder.glob(f"{key}.*"):
        path.unlink(missing_ok=True)

"""Checkpoints of a run: a resumed run is bit-identical to an uninterrupted one."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from comparison.run.run_setup import RunSetup

SECONDS = 20.0
"""Minimum time between checkpoints."""


class Checkpoint:
    """The checkpoint file of a run."""

    def __init__(self, setup: RunSetup, folder: Path) -> None:
        """Set the path; no file is read or written yet."""
        self._path = folder / f"{setup.run.key}.pt"
        self._setup = setup
        self._last = time.monotonic()

    def due(self) -> bool:
        """Whether it is time for a checkpoint."""
        return time.monotonic() - self._last >= SECONDS

    def save(self, epoch: int, history: Mapping[str, Any]) -> None:
        """Save the state after an epoch, replacing the previous file atomically."""
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
        partial = self._path.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self._path)
        self._last = time.monotonic()

    def load(self) -> tuple[int, dict[str, Any]]:
        """Restore the state. Return the number of finished epochs and the history, or (0, {}) without a checkpoint."""
        state = self._read()
        if state is None:
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
        """The state; None if the file is missing or corrupted, which restarts the run."""
        try:
            state: dict[str, Any] = torch.load(self._path, weights_only=True, map_location="cpu")
        # A damaged file raises errors of many kinds.
        except Exception:
            return None
        return state


def delete(folder: Path, key: str) -> None:
    """Delete the checkpoint of a run whose record is stored."""
    (folder / f"{key}.pt").unlink(missing_ok=True)

"""Resuming a run in a new process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from hookdrop import (
    Injection,
)
from tests.support.paths import ROOT
from tests.support.state import injected


def train(model: nn.Module, drop: Injection, steps: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(4, 3, 8, 8)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        drop.step()
        losses.append(loss.item())
    return losses


RESUME = """
import sys, torch
sys.path.insert(0, {root!r})
from tests.integration.processes.test_state_dict import injected, train
saved = torch.load({path!r}, weights_only=True)
model, drop = injected()
model.load_state_dict(saved["model"])
drop.load_state_dict(saved["drop"])
torch.set_rng_state(saved["rng"])
torch.set_num_threads(1)
losses = []
for _ in range(2):
    losses += train(model, drop, 3)
    drop.enable()
torch.save((losses, model.state_dict(), drop.state_dict()), {out!r})
"""


@pytest.mark.parametrize("at", [0, 1, 7, 19, 25])
def test_resumed_run_is_bit_identical(at: int, tmp_path: Path) -> None:
    """With a changed target_p, and a disable() before the checkpoint."""
    model, drop = injected()
    train(model, drop, at)
    drop.target_p = 0.3
    if at == 7:
        drop.disable()
    path, out = tmp_path / "checkpoint.pt", tmp_path / "out.pt"
    torch.save({"model": model.state_dict(), "drop": drop.state_dict(), "rng": torch.get_rng_state()}, path)
    code = RESUME.format(root=str(ROOT), path=str(path), out=str(out))
    subprocess.run([sys.executable, "-c", code], check=True)
    losses = []
    for _ in range(2):
        losses += train(model, drop, 3)
        drop.enable()
    resumed, weights, state = torch.load(out, weights_only=True)
    assert resumed == losses
    assert all(torch.equal(weights[key], value) for key, value in model.state_dict().items())
    assert state == drop.state_dict()

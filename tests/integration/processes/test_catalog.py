"""Adding a new regularizer to the catalog."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import hookdrop
from tests.support.paths import ROOT

NEW = """
from torch import Tensor

from hookdrop.regularizers.base import Regularizer
from hookdrop.utils.validation import rate


def shrink(x: Tensor, amount: float, training: bool = True) -> Tensor:
    return x * (1.0 - rate(amount, "amount", "shrink")) if training else x


class Shrink(Regularizer):
    rate_name = "amount"

    def __init__(self, amount: float = 0.1) -> None:
        super().__init__()
        self.amount = self.valid_rate(amount)

    def regularize_at(self, x, rate):
        return x * (1.0 - rate)
"""


USED = """
import torch, hookdrop
from tests.support import every
from hookdrop import *
from hookdrop import functional

assert "Shrink" in hookdrop.__all__ and "shrink" in functional.__all__
assert repr(hookdrop.parse("Shrink(amount=0.25)")) == "Shrink(amount=0.25)"
assert functional.shrink(torch.ones(1), 0.25).item() == 0.75
assert isinstance(every.EVERY["Shrink"].regularizer, Shrink)
model = torch.nn.Sequential(torch.nn.Identity())
with hookdrop.inject(model, "Shrink(amount=0.5)", layers="0", schedule=LinearSchedule(2)) as drop:
    drop.step()
    assert model(torch.ones(1)).item() == 0.75
    config = drop.config
hookdrop.from_config(model, config)
assert model(torch.ones(1)).item() == 1.0
assert torch.compile(Shrink(0.5), backend="eager", fullgraph=True)(torch.ones(1)).item() == 0.5
"""


def test_adding_a_regularizer_takes_one_module_and_two_registrations(tmp_path: Path) -> None:
    """`hookdrop.__all__`, `parse`, configs and the tables of these tests need no changes."""
    package = Path(shutil.copytree(Path(hookdrop.__file__).parent, tmp_path / "hookdrop"))
    (package / "regularizers" / "shrink.py").write_text(NEW)
    for file, row in (("regularizers/catalog.py", "Shrink"), ("functional.py", "shrink")):
        text = (package / file).read_text()
        imported = f'from hookdrop.regularizers.shrink import {row}\n__all__ = [\n    "{row}",'
        (package / file).write_text(text.replace("__all__ = [", imported, 1))
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    run = subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c", USED],
        env={**os.environ, "PYTHONPATH": paths},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr

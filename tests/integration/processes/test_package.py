"""The package in a new process: what it imports, and a new regularizer."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import hookdrop
from tests.support.programs import ROOT, run_code


def test_the_compiler_and_pyplot_are_imported_only_when_needed(tmp_path: Path) -> None:
    """The compiler takes about as long as PyTorch. (PyTorch's optimizers and fake tensors import it too.)

    Libraries of models are not needed. Importing pyplot would keep figures open and display them twice in notebooks.
    """
    pytest.importorskip("matplotlib")
    run_code(f"""
import sys, torch
from torch import nn
sys.modules.update(timm=None, torchvision=None, transformers=None)
from hookdrop import DropBlock, Dropout, LinearSchedule, find, inject, observe, recipes
model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1))
drop = inject(model, DropBlock(0.1, 3), layers="0", schedule=LinearSchedule(4))
inject(model, nn.Dropout(0.5), layers="1")
model(torch.ones(1, 3, 8, 8)).sum().backward()
drop.step()
drop.probe(torch.ones(1, 3, 8, 8))
torch.save(model, {str(tmp_path / "model.pt")!r})
find(torch.load({str(tmp_path / "model.pt")!r}, weights_only=False)).step()
with drop.recording() as recorded:
    model(torch.ones(1, 3, 8, 8))
assert recipes.stochastic_depth
assert "torch._dynamo" not in sys.modules and "matplotlib" not in sys.modules

from matplotlib.backends.backend_agg import FigureCanvasAgg
for figure in (recorded.plot_features(), recorded.plot_masks(), observe.plot_schedule(drop, 5)):
    FigureCanvasAgg(figure).draw()
assert "matplotlib.pyplot" not in sys.modules
""")


NEW = """
from torch import Tensor

from hookdrop.regularizers.base import Regularizer
from hookdrop.regularizers.base import Rate


AMOUNT = Rate("amount", kind="factor")


def shrink(x: Tensor, amount: float, training: bool = True) -> Tensor:
    return x * (1.0 - AMOUNT.argument(amount, x, "shrink")) if training else x


class Shrink(Regularizer):
    rate = AMOUNT

    def __init__(self, amount: float = 0.1) -> None:
        super().__init__()
        self.amount = amount

    def regularize(self, x, rate):
        return x * (1.0 - rate)
"""


USED = """
import torch, hookdrop
from tests.support.regularizers import EVERY
from hookdrop import *
from hookdrop import functional

assert "Shrink" in hookdrop.__all__ and "shrink" in functional.__all__
assert repr(hookdrop.parse("Shrink(amount=0.25)")) == "Shrink(amount=0.25)"
assert functional.shrink(torch.ones(1), 0.25).item() == 0.75
assert isinstance(EVERY["Shrink"].regularizer, Shrink)
model = torch.nn.Sequential(torch.nn.Identity())
with hookdrop.inject(model, "Shrink(amount=0.5)", layers="0", schedule=LinearSchedule(2)) as drop:
    drop.step()
    assert model(torch.ones(1)).item() == 0.75
    spec = hookdrop.InjectionSpec.from_dict(drop.spec.to_dict())
hookdrop.inject(model, spec)
assert model(torch.ones(1)).item() == 1.0
assert torch.compile(Shrink(0.5), backend="eager", fullgraph=True)(torch.ones(1)).item() == 0.5
"""


def test_adding_a_regularizer_takes_one_module_and_two_registrations(tmp_path: Path) -> None:
    """`hookdrop.__all__`, `parse`, specs and the tables of these tests need no changes."""
    package = Path(shutil.copytree(Path(hookdrop.__file__).parent, tmp_path / "hookdrop"))
    (package / "regularizers" / "shrink.py").write_text(NEW)
    for file, row in (("regularizers/__init__.py", "Shrink"), ("functional.py", "shrink")):
        text = (package / file).read_text()
        imported = f'from hookdrop.regularizers.shrink import {row}\n__all__ = [\n    "{row}",'
        (package / file).write_text(text.replace("__all__ = [", imported, 1))
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    flags = ("-W", "error", "-W", "ignore::DeprecationWarning")
    run_code(USED, *flags, env={**os.environ, "PYTHONPATH": paths}, cwd=tmp_path)

"""The package in a new process: what it imports, and a new regularizer."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import hookdrop
from tests.support.programs import ROOT, run_code


def test_the_compiler_is_imported_only_when_something_is_compiled(tmp_path: Path) -> None:
    """The import takes about as long as that of PyTorch. (PyTorch's optimizers and fake tensors import it too.)

    Libraries of models are not needed.
    """
    run_code(f"""
import sys, torch
from torch import nn
sys.modules.update(timm=None, torchvision=None, transformers=None)
from hookdrop import DropBlock, Dropout, LinearSchedule, find, inject, observe, recipes
model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(6, 6))
drop = inject(model, DropBlock(0.1, 3), layers="0", schedule=LinearSchedule(4))
inject(model, nn.Dropout(0.5), layers="1")
model(torch.ones(1, 3, 8, 8)).sum().backward()
drop.step()
drop.probe(torch.ones(1, 3, 8, 8))
torch.save(model, {str(tmp_path / "model.pt")!r})
find(torch.load({str(tmp_path / "model.pt")!r}, weights_only=False)).step()
drop.remove()
with observe.stats(model) as seen:
    model(torch.ones(1, 3, 8, 8))
assert list(seen) == ["0", "1"]
assert recipes.stochastic_depth
assert "torch._dynamo" not in sys.modules
""")


def test_pyplot_is_not_imported() -> None:
    """Importing pyplot would keep figures open and display them twice in notebooks."""
    pytest.importorskip("matplotlib")
    run_code("""
import sys, torch
from torch import nn
from hookdrop import Dropout, inject, observe
assert "matplotlib" not in sys.modules
model = nn.Sequential(nn.Conv2d(1, 2, 3))
drop = inject(model, Dropout(0.5), layers="0")
with drop.recording() as r, observe.stats(model) as s:
    model(torch.ones(1, 1, 5, 5))
from matplotlib.backends.backend_agg import FigureCanvasAgg
for figure in (r.plot_features(), r.plot_masks(), s.plot(), observe.plot_schedule(drop, 5)):
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

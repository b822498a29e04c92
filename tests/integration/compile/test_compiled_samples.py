"""ShakeDrop, DSU, MixStyle and Masksembles in compiled code: one graph for all rates, the right rate, and the masks of eager code."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from hookdrop import DropPath, LinearSchedule, Masksembles, NEFTune, Regularizer, ShakeDrop, inject
from tests.support.compiling import Net, graphs
from tests.support.tensors import within
from tests.unit.hooks.test_call_context import IDS, MASK, TokenModel, Windowed

pytestmark = pytest.mark.filterwarnings("ignore:Skipping serialization:UserWarning")  # raised by PyTorch 2.6 itself


def hooked(regularizer: Regularizer, schedule: LinearSchedule | None = None) -> tuple[nn.Module, object]:
    model = Net()
    return model, inject(model, regularizer, layers="inner", schedule=schedule)


def test_the_rate_of_shake_drop_may_change_between_forward_and_backward() -> None:
    """For ones, the output is the forward and the gradient the backward factor; `test_conformance.py` has the rates."""
    model, drop = hooked(ShakeDrop(0.5), LinearSchedule(10))
    fast = torch.compile(model, backend="aot_eager", fullgraph=True)
    drop.seek(4)
    y = fast(x := torch.ones(20_000, 2, requires_grad=True))
    drop.seek(10)
    forward, backward = ((t * (1 - 0.2)).detach() for t in (y, *torch.autograd.grad(y.sum(), x)))
    kept = (forward[:, 0] - 1.0).abs() < 1e-6
    assert torch.equal(forward[:, 0], forward[:, 1])
    assert within((~kept).double().mean(), 0.2, 0.4, len(kept))
    torch.testing.assert_close(backward[kept], torch.ones_like(backward[kept]))


@pytest.mark.parametrize("shape", [(12,), (12, 5, 5), (12, 3, 3, 3)], ids=str)
def test_compiled_masksembles_equals_eager(shape: tuple[int, ...]) -> None:
    """Two graphs: the first batch size and all others. In eval mode, the result is the input."""
    model, _ = hooked(Masksembles(n=4))
    fast = torch.compile(model, backend="aot_eager", fullgraph=True)
    for size in (8, 12, 32):
        results = []
        x = torch.randn(size, *shape, requires_grad=True)
        for call in (model, fast, copy.deepcopy(model)):
            y = call(x)
            results.append([y, *torch.autograd.grad(y.square().sum(), x)])
        assert not torch.equal(results[0][0], x)
        torch.testing.assert_close(results[1:], [results[0]] * 2)
    assert graphs() == 2
    model.eval()
    assert torch.equal(fast(x), x)


@pytest.mark.parametrize("part", ["model", "embed"])
def test_the_attention_mask_reaches_a_compiled_embedding(part: str) -> None:
    """In the graph, or from the eager model around it; a call without a mask has no padding."""
    model = TokenModel()
    inject(model, NEFTune(5, attention_mask=True), layers="embed")
    clean = model.embed.weight[IDS]
    if part == "embed":
        model.embed.compile(backend="aot_eager", fullgraph=True)
        fast: Any = model
    else:
        fast = torch.compile(model, backend="aot_eager", fullgraph=True)
    for mask in (MASK, 1 - MASK):
        assert torch.equal((fast(IDS, mask) != clean).any(-1), mask == 1)
    assert (fast(IDS) != clean).any(-1).all()
    if part == "embed":
        assert (model.embed(IDS) != clean).any(-1).all()


def test_the_number_of_samples_reaches_a_compiled_layer() -> None:
    model = Windowed()
    inject(model, Spread(samples=("", 0, False)), layers="inner")
    fast = torch.compile(model, backend="aot_eager", fullgraph=True)
    for samples in (3, 5, 7):
        assert fast(torch.zeros(samples, 8)).tolist() == [[samples] * 4] * (2 * samples)
    assert graphs() <= 2, "one more for a dynamic batch size"


class Spread(Regularizer):
    """Returns the number of samples."""

    needs = ("samples",)

    def __init__(self, p: float = 0.5, samples: Any = None) -> None:
        super().__init__()
        self.p, self.samples = p, samples

    def regularize(self, x: torch.Tensor, rate: Any, samples: Any = None) -> torch.Tensor:
        return torch.full_like(x, samples.count)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler reads it
def test_a_compiled_branch_runs_on_the_samples_of_eager_code_from_its_first_call() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(8, 4)
    inject(model, DropPath(0.5, mode="subset"), layers="0")
    outputs = []
    for run in (torch.compile(copy.deepcopy(model), backend="aot_eager"), model):
        torch.manual_seed(0)
        outputs.append(run(x))
    torch.testing.assert_close(*outputs)
    assert int((outputs[0] == 0).all(1).sum()) >= 4

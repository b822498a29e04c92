"""ShakeDrop, DSU, MixStyle and Masksembles in compiled code: one graph for all rates, the right rate, and the masks of eager code."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from hookdrop import DSU, DropPath, LinearSchedule, Masksembles, MixStyle, NEFTune, Regularizer, ShakeDrop, inject
from tests.support.compiling import Net, graphs
from tests.support.tensors import all_equal, styled, within
from tests.unit.hooks.test_call_context import IDS, MASK, TokenModel, Windowed

pytestmark = pytest.mark.filterwarnings("ignore:Skipping serialization:UserWarning")  # raised by PyTorch 2.6 itself


def hooked(regularizer: Regularizer, schedule: LinearSchedule | None = None) -> tuple[nn.Module, object]:
    model = Net()
    return model, inject(model, regularizer, layers="inner", schedule=schedule)


def test_compiled_shake_drop_follows_its_schedule() -> None:
    """Two graphs: at rate 0 and above. For ones, the output is the forward and the gradient the backward factor."""
    n, p = 20_000, 0.5
    model, drop = hooked(ShakeDrop(p, alpha=(-1.0, 1.0), beta=(0.0, 1.0)), LinearSchedule(10))
    fast = torch.compile(model, fullgraph=True)
    for step in (0, 4, 10):
        drop.seek(step)
        x = torch.ones(n, 2, requires_grad=True)
        y = fast(x)
        drop.seek(10)  # between forward and backward
        (grad,) = torch.autograd.grad(y.sum(), x)
        rate = p * step / 10
        forward, backward = ((t * (1 - rate)).detach() for t in (y, grad))
        assert torch.equal(forward[:, 0], forward[:, 1])
        assert torch.equal(backward[:, 0], backward[:, 1])
        perturbed = (forward[:, 0] - 1.0).abs() > 1e-6
        assert within(perturbed.double().mean(), rate, math.sqrt(rate * (1 - rate)), n)
        torch.testing.assert_close(backward[~perturbed], torch.ones_like(backward[~perturbed]))
        if step:
            alpha, beta = forward[perturbed, 0], backward[perturbed, 0]
            assert within(alpha.mean(), 0.0, math.sqrt(1 / 3), len(alpha))
            assert within(beta.mean(), 0.5, math.sqrt(1 / 12), len(beta))
            assert (alpha.min() < -0.9) & (beta.min() > 0.0) & (beta.max() > 0.9)
    assert graphs() <= 2


@pytest.mark.parametrize("regularizer", [DSU(1.0), MixStyle(1.0, alpha=5.0)], ids=repr)
def test_batches_are_mixed_at_the_rate_of_the_schedule(regularizer: Regularizer) -> None:
    """The rate is right within 4 standard errors, and other batches are unchanged. One graph above rate 0."""
    model, drop = hooked(regularizer, LinearSchedule(10))
    fast, x = torch.compile(model, backend="aot_eager", fullgraph=True), styled()
    for step in (3, 7):
        drop.seek(step)
        changed = sum(not torch.equal(fast(x), x) for _ in range(400))
        assert abs(changed / 400 - step / 10) < 4 * math.sqrt(0.21 / 400)
    assert graphs() == 1


@pytest.mark.parametrize("shape", [(8, 12), (8, 12, 5, 5), (4, 12, 3, 3, 3)], ids=str)
def test_compiled_masksembles_equals_eager(shape: tuple[int, ...]) -> None:
    """Also after another compilation in a copy."""
    model, _ = hooked(Masksembles(n=4))
    x = torch.randn(shape, requires_grad=True)
    results = []
    for call in (model, torch.compile(model, backend="aot_eager", fullgraph=True), copy.deepcopy(model)):
        y = call(x)
        results.append([y, *torch.autograd.grad(y.square().sum(), x)])
    assert not torch.equal(results[0][0], x)
    assert all_equal(results[0], results[2])
    for found, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, expected)
    assert graphs() == 1


def test_compiled_masksembles_with_other_batch_sizes() -> None:
    """Two graphs: the first size and all others. In eval mode, the result is the input."""
    model, _ = hooked(Masksembles(n=4))
    fast = torch.compile(model, backend="aot_eager", fullgraph=True)
    for size in (8, 12, 16, 32):
        x = torch.randn(size, 12, 3, 3)
        torch.testing.assert_close(fast(x), model(x))
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

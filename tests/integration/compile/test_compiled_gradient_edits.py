"""Gradient edits in compiled code."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hookdrop import ClipActivationGrad, LinearSchedule, NoiseActivationGrad, ScaleActivationGrad, inject
from tests.support.compiling import graphs
from tests.support.gradient_edits import CASES, NON_FINITE, G, Net, gradient


def test_compiled_norms_that_overflow_float32() -> None:
    model = Net()
    inject(model, ClipActivationGrad(max_norm=1.0), layers="inner")
    fast = torch.compile(model, backend="inductor", fullgraph=True)
    assert gradient(fast, torch.full((4, 4), 3e30)).norm().item() == pytest.approx(2)
    assert gradient(fast, torch.full((4, 4), math.inf)).isnan().all()


def test_compiled_factor_0_zeros_non_finite_gradients() -> None:
    """At the first step of a ramp the factor is 0."""
    model = Net()
    drop = inject(model, ScaleActivationGrad(-1), layers="inner", schedule=LinearSchedule(4))
    fast = torch.compile(model, backend="inductor", fullgraph=True)
    assert torch.equal(gradient(fast, NON_FINITE), torch.zeros(4))
    drop.seek(4)
    torch.testing.assert_close(gradient(fast, NON_FINITE), -2 * NON_FINITE, equal_nan=True)
    assert graphs() == 1


# Warnings of PyTorch itself: the compiler of 2.13 and older instantiates autograd functions; the other is of 2.6.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*Function.*should not be instantiated:DeprecationWarning", "ignore:Skipping serialization:UserWarning"
)


@pytest.mark.parametrize(
    ("name", "backend"),
    [("norm", "inductor"), ("norm per sample", "aot_eager"), ("value", "aot_eager"), ("clamp", "aot_eager")],
)
def test_compiles_without_a_graph_break(backend: str, name: str) -> None:
    """Also before an in-place activation. Eval has a separate graph."""
    regularizer, expected = CASES[name]
    model = Net(nn.ReLU(inplace=True))
    inject(model, regularizer, layers="inner")
    fast = torch.compile(model, backend=backend, fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(gradient(fast), 2 * expected)
    model.eval()
    torch.testing.assert_close(gradient(fast), 2 * G)
    assert graphs() == 2


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_scale_follows_its_schedule(backend: str) -> None:
    """One graph for all factors. Backward uses the factor of the forward, even if it has changed since."""
    model = Net()
    drop = inject(model, ScaleActivationGrad(-1), layers="inner", schedule=LinearSchedule(20))
    fast = torch.compile(model, backend=backend, fullgraph=True)
    for step in range(21):
        drop.seek(step)
        x = torch.ones(3, requires_grad=True)
        y = fast(x)
        drop.seek(7)
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], torch.full((3,), -2 * step / 20))
    assert graphs() == 1
    drop.target_p = 20.0
    drop.seek(1)  # a factor of 1 compiles another, empty graph
    torch.testing.assert_close(gradient(fast), 2 * G)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_noise_follows_its_schedule(backend: str) -> None:
    """Within 4 standard errors over 100,000 elements."""
    model = Net()
    drop = inject(model, NoiseActivationGrad(1.0), layers="inner", schedule=LinearSchedule(10))
    fast = torch.compile(model, backend=backend, fullgraph=True)
    draws = []
    for step in (3, 3, 9):
        drop.seek(step)
        found = gradient(fast, torch.ones(100_000)) / 2 - 1
        assert found.std().item() == pytest.approx(step / 10, rel=4 / math.sqrt(2e5))
        draws.append(found)
    assert not torch.equal(draws[0], draws[1])
    assert graphs() == 1


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_compiled_checkpointing(use_reentrant: bool) -> None:
    model = Net()
    inject(model, ScaleActivationGrad(-1), layers="inner")
    fast = torch.compile(lambda x: checkpoint(model, x, use_reentrant=use_reentrant), backend="aot_eager")
    torch.testing.assert_close(gradient(fast), -2 * G)

"""Gradient edits in compiled code."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hookdrop import (
    ClipActivationGrad,
    LinearSchedule,
    NoiseActivationGrad,
    ScaleActivationGrad,
    find,
    inject,
)
from tests.support.compiling import graphs
from tests.support.gradient_edits import NON_FINITE, G, Net, gradient
from tests.support.models import toy

# Warnings of PyTorch itself: the compiler of 2.13 and older instantiates autograd functions; the other is of 2.6.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*Function.*should not be instantiated:DeprecationWarning", "ignore:Skipping serialization:UserWarning"
)


def test_edits_in_code_of_inductor() -> None:
    """Norms that overflow float32, the factor 0 of non-finite gradients at the first step of a ramp, and noise."""
    edits = [ClipActivationGrad(max_norm=1.0), ScaleActivationGrad(-1), NoiseActivationGrad(1.0)]
    shapes = [(4, 4), (4,), (100_000,)]
    sites = nn.ModuleList(nn.Identity() for _ in edits)
    model = toy(lambda self, inputs: [site(x * 2.0) for site, x in zip(self.sites, inputs, strict=True)], sites=sites)
    drops = [inject(model, edit, layers=f"sites.{i}") for i, edit in enumerate(edits)]
    fast = torch.compile(model, fullgraph=True)

    def gradients(clip: float) -> list[Tensor]:
        inputs = [torch.rand(shape, requires_grad=True) for shape in shapes]
        given = [torch.full((4, 4), clip), NON_FINITE, torch.ones(100_000)]
        return list(torch.autograd.grad(fast(inputs), inputs, given))

    clipped, scaled, noisy = gradients(3e30)
    assert clipped.norm().item() == pytest.approx(2)
    torch.testing.assert_close(scaled, -2 * NON_FINITE, equal_nan=True)
    assert (noisy / 2).std().item() == pytest.approx(1, rel=4 / math.sqrt(2e5))
    assert gradients(math.inf)[0].isnan().all()
    assert graphs() == 1
    drops[1].target_p = 0.0
    assert torch.equal(gradients(1.0)[1], torch.zeros(4))


def test_compiled_scale_and_noise_follow_their_schedules() -> None:
    """One graph for all rates, also before an in-place activation. Backward uses the rate of the forward."""
    model, ramp = Net(nn.ReLU(inplace=True)), LinearSchedule(20)
    scale = inject(model, ScaleActivationGrad(-1), layers="inner", schedule=ramp)
    noise = inject(model, NoiseActivationGrad(1.0), layers="act", schedule=ramp)
    fast, draws = torch.compile(model, backend="aot_eager", fullgraph=True), []
    for step in (0, 1, 6, 6, 20):
        find(model).seek(step)
        x = torch.ones(100_000, requires_grad=True)
        y = fast(x)
        find(model).seek(7)
        (found,) = torch.autograd.grad(y.sum(), x)
        assert found.mean().item() == pytest.approx(-2 * step / 20, abs=0.02)
        if step:
            draws.append(found / (-2 * step / 20) - 1)
            assert draws[-1].std().item() == pytest.approx(step / 20, rel=4 / math.sqrt(2e5))
    assert not torch.equal(draws[1], draws[2])
    assert graphs() <= 2
    noise.remove()
    scale.target_p = 20.0
    scale.seek(1)  # a factor of 1 compiles another, empty graph
    torch.testing.assert_close(gradient(fast), 2 * G)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_compiled_checkpointing(use_reentrant: bool) -> None:
    model = Net()
    inject(model, ScaleActivationGrad(-1), layers="inner")
    fast = torch.compile(lambda x: checkpoint(model, x, use_reentrant=use_reentrant), backend="aot_eager")
    torch.testing.assert_close(gradient(fast), -2 * G)

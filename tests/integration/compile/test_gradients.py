"""What edits the gradient of a hooked tensor: exactly that gradient, on this path alone, and nothing forward."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from hookdrop import (
    ClipActivationGrad,
    LinearSchedule,
    NoiseActivationGrad,
    ScaleActivationGrad,
    inject,
)
from tests.support.gradients import CASES, WILD, G, Net, gradient

COMPILED = pytest.mark.parametrize("backend", ["aot_eager", "inductor"])


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


@COMPILED
def test_compiled_norms_that_float32_can_not_hold(backend: str, fresh_compiler: None) -> None:
    model = Net()
    inject(model, ClipActivationGrad(max_norm=1.0), layers="inner")
    fast = torch.compile(model, backend=backend, fullgraph=True)
    assert gradient(fast, torch.full((4, 4), 3e30)).norm().item() == pytest.approx(2)
    assert gradient(fast, torch.full((4, 4), math.inf)).isnan().all()


@COMPILED
def test_compiled_0_stops_what_is_not_finite_too(backend: str, fresh_compiler: None) -> None:
    """The first step of a ramp."""
    model = Net()
    drop = inject(model, ScaleActivationGrad(-1), layers="inner", schedule=LinearSchedule(4))
    fast = torch.compile(model, backend=backend, fullgraph=True)
    assert torch.equal(gradient(fast, WILD), torch.zeros(4))
    drop.seek(4)
    torch.testing.assert_close(gradient(fast, WILD), -2 * WILD, equal_nan=True)
    assert counters["stats"]["unique_graphs"] == 1


# PyTorch's own: of 2.13 and older, whose compiler makes an instance of each autograd function, and of 2.6's inductor.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*Function.*should not be instantiated:DeprecationWarning", "ignore:Skipping serialization:UserWarning"
)


@COMPILED
@pytest.mark.parametrize("name", ["norm", "norm of samples", "value", "clamp", "reversed"])
def test_compiled_without_a_break(backend: str, name: str, fresh_compiler: None) -> None:
    """Before an activation that writes in place, too; eval is a graph of its own."""
    regularizer, expected = CASES[name]
    model = Net(nn.ReLU(inplace=True))
    inject(model, regularizer, layers="inner")
    fast = torch.compile(model, backend=backend, fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(gradient(fast), 2 * expected)
    model.eval()
    torch.testing.assert_close(gradient(fast), 2 * G)
    assert counters["stats"]["unique_graphs"] == 2


@COMPILED
def test_compiled_it_follows_its_schedule(backend: str, fresh_compiler: None) -> None:
    """One graph for all factors; that of the forward counts, whatever is set before the backward pass."""
    model = Net()
    drop = inject(model, ScaleActivationGrad(-1), layers="inner", schedule=LinearSchedule(20))
    fast = torch.compile(model, backend=backend, fullgraph=True)
    for step in range(21):
        drop.seek(step)
        x = torch.ones(3, requires_grad=True)
        y = fast(x)
        drop.seek(7)
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], torch.full((3,), -2 * step / 20))
    assert counters["stats"]["unique_graphs"] == 1
    drop.target_p = 20.0
    drop.seek(1)  # a factor of 1: another graph, with nothing in it
    torch.testing.assert_close(gradient(fast), 2 * G)


@COMPILED
def test_compiled_noise_follows_its_schedule(backend: str, fresh_compiler: None) -> None:
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
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_in_compiled_code(use_reentrant: bool, fresh_compiler: None) -> None:
    model = Net()
    inject(model, ScaleActivationGrad(-1), layers="inner")
    fast = torch.compile(lambda x: checkpoint(model, x, use_reentrant=use_reentrant), backend="aot_eager")
    torch.testing.assert_close(gradient(fast), -2 * G)

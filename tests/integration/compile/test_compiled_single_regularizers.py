"""What only some regularizers do in compiled code; test_compiled_regularizers.py and test_conformance.py have what all do."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.utils.checkpoint import checkpoint

from hookdrop import (
    ClipActivationGrad,
    DropBlock,
    DropPath,
    HookdropWarning,
    LinearSchedule,
    Masksembles,
    NEFTune,
    NoiseActivationGrad,
    Regularizer,
    ScaleActivationGrad,
    ShapeError,
    inject,
)
from hookdrop.functional import drop_block
from tests.support.compiling import graphs
from tests.support.models import toy
from tests.support.tensors import zero_fraction
from tests.unit.hooks.test_hook import IDS, MASK, TokenModel, windowed
from tests.unit.regularizers.test_gradients import NON_FINITE, G, Net, gradient

# Warnings of PyTorch itself: the compiler of 2.13 and older instantiates autograd functions; the other is of 2.6.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*Function.*should not be instantiated:DeprecationWarning", "ignore:Skipping serialization:UserWarning"
)


# --- DropBlock


def test_compiled_matches_eager_with_the_same_seed() -> None:
    """Forward and gradient, for each way to normalize, to share masks and to draw: with sparse and with dense seeds."""
    variants = list(product(["batch", "sample", "expected", None], [(0.1, True), (0.1, False), (0.97, True)]))
    drops = [DropBlock(p, 5, normalize=normalize, per_channel=own) for normalize, (p, own) in variants]
    model = toy(lambda self, x: [site(x) for site in self.sites], sites=nn.ModuleList(nn.Identity() for _ in drops))
    inject(model, {f"sites.{i}": drop for i, drop in enumerate(drops)})
    x = torch.randn(8, 16, 20, 20).requires_grad_()

    def outputs_and_gradients(call: Callable[[Tensor], list[Tensor]]) -> list[Tensor]:
        torch.manual_seed(3)
        outputs = call(x)
        return [*outputs, *(torch.autograd.grad(y.square().sum(), x, retain_graph=True)[0] for y in outputs)]

    found = outputs_and_gradients(torch.compile(model, backend="aot_eager", fullgraph=True))
    torch.testing.assert_close(found, outputs_and_gradients(model))


def test_vmap_draws_a_mask_for_each_slice() -> None:
    cases = [("batch", 0.3), ("batch", 0.97), ("sample", 0.3), ("expected", 0.3)]

    def slices(x: Tensor) -> list[Tensor]:
        return [vmap(lambda x: drop_block(x, p, 3, normalize=n), randomness="different")(x) for n, p in cases]  # noqa: B023

    outputs = torch.compile(slices, backend="aot_eager", fullgraph=True)(torch.ones(5, 4, 8, 20, 20))
    for (normalize, _), y in zip(cases, outputs, strict=True):
        assert len(torch.unique(y == 0, dim=0)) == 5
        if normalize == "batch":
            torch.testing.assert_close(y.mean((1, 2, 3, 4)), torch.ones(5))


@pytest.mark.skipif(torch.__version__ < (2, 14), reason="PyTorch 2.13 and older refuse it")
@pytest.mark.filterwarnings("ignore")  # raised by dynamo
@pytest.mark.parametrize("p", [0.3, 0.97])
def test_per_slice_gradients_drop_at_p(p: float) -> None:
    """PyTorch breaks the graph at `torch.func` transforms and traces what runs inside them."""
    each = vmap(grad(lambda x: drop_block(x, p, 3).sum()), randomness="different")
    y = torch.compile(lambda x: each(x), backend="aot_eager")(torch.ones(5, 4, 8, 20, 20))
    assert zero_fraction(y) == pytest.approx(p, abs=0.04)
    torch.testing.assert_close(y.mean((1, 2, 3, 4)), torch.ones(5))


def test_unsupported_shape_raises() -> None:
    model = nn.Sequential(nn.Identity())
    inject(model, DropBlock(0.3, 3), layers="0")
    with pytest.raises(ShapeError):
        torch.compile(model, backend="eager")(torch.ones(2, 5, 8))


def test_shape_warnings_are_raised_at_the_next_step() -> None:
    """Warnings cannot be raised from inside a compiled graph."""
    model = nn.Sequential(nn.Identity())
    drop = inject(model, DropBlock(0.3, 7), layers="0", schedule=LinearSchedule(10))
    fast = torch.compile(model, backend="aot_eager", fullgraph=True)
    fast(torch.ones(2, 5, 7, 7))
    assert "covers the whole 7x7 map" in "".join(drop.check())
    with pytest.warns(HookdropWarning, match="covers the whole 7x7 map"):
        drop.step()
    fast(torch.ones(2, 5, 7, 7))
    drop.step()
    assert not drop.check()


# --- samples and masks


@pytest.mark.parametrize("shape", [(12,), (12, 5, 5), (12, 3, 3, 3)], ids=str)
def test_compiled_masksembles_equals_eager(shape: tuple[int, ...]) -> None:
    """Two graphs: the first batch size and all others. In eval mode, the result is the input."""
    inject(model := nn.Sequential(nn.Identity()), Masksembles(n=4), layers="0")
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
    model = windowed()
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


# --- gradient edits


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


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_compiled_checkpointing(use_reentrant: bool) -> None:
    model = Net()
    inject(model, ScaleActivationGrad(-1), layers="inner")
    fast = torch.compile(lambda x: checkpoint(model, x, use_reentrant=use_reentrant), backend="aot_eager")
    torch.testing.assert_close(gradient(fast), -2 * G)

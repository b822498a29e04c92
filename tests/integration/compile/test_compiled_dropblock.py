"""DropBlock in compiled code. Tests that apply to all regularizers are in test_compiled_regularizers.py."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from hookdrop import DropBlock, HookdropWarning, LinearSchedule, ShapeError, inject
from hookdrop.functional import drop_block
from tests.support.models import toy
from tests.support.tensors import zero_fraction


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

"""DropBlock in compiled code. Tests that apply to all regularizers are in test_compiled_regularizers.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import grad, vmap

from hookdrop import DropBlock, HookdropWarning, LinearSchedule, ShapeError, inject
from hookdrop.functional import drop_block
from tests.support.compiling import Net
from tests.support.tensors import zero_fraction

X = torch.ones(16, 16, 20, 20)


@pytest.mark.parametrize("normalize", ["batch", "sample", "expected", None])
@pytest.mark.parametrize(("p", "per_channel"), [(0.1, True), (0.1, False), (0.97, True)])
def test_compiled_matches_eager_with_the_same_seed(normalize: str | None, per_channel: bool, p: float) -> None:
    """Forward and gradient, with sparse and with dense seeds."""
    x = torch.randn(X.shape).requires_grad_()

    def both(call: object) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(3)
        y = call(x)  # type: ignore[operator]
        return y.detach(), torch.autograd.grad((y * y).sum(), x)[0]

    model = Net()
    inject(model, DropBlock(p, 5, normalize=normalize, per_channel=per_channel), layers="inner")
    for ours, theirs in zip(both(torch.compile(model, backend="aot_eager", fullgraph=True)), both(model), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("normalize", "p"), [("batch", 0.3), ("batch", 0.97), ("sample", 0.3), ("expected", 0.3)])
def test_vmap_draws_a_mask_for_each_slice(normalize: str, p: float) -> None:
    def both(x: torch.Tensor) -> torch.Tensor:
        return vmap(lambda x: drop_block(x, p, 3, normalize=normalize), randomness="different")(x)

    y = torch.compile(both, backend="aot_eager", fullgraph=True)(torch.ones(5, 4, 8, 20, 20))
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
    with pytest.raises(ShapeError, match="DropBlock at '0' got \\(2, 5, 8\\): tokens have no map"):
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

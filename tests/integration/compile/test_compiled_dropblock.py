"""DropBlock in compiled code. Tests that apply to all regularizers are in test_compiled_regularizers.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import grad, vmap

from hookdrop import DropBlock, HookdropWarning, LinearSchedule, ShapeError, inject
from hookdrop.functional import drop_block
from tests.support.compiling import Net, graphs
from tests.support.tensors import zero_fraction

X = torch.ones(16, 16, 20, 20)


@pytest.mark.parametrize("settings", [{}, {"normalize": "expected"}, {"normalize": "sample"}, {"per_channel": False}])
def test_three_graphs_serve_a_thousand_steps(settings: dict[str, object]) -> None:
    """Training at rate 0, training above it, and eval. With fullgraph, a graph break would be an error."""
    model = Net()
    drop = inject(model, DropBlock(0.4, 3, **settings), layers="inner", schedule=LinearSchedule(1000))
    fast = torch.compile(model, backend="aot_eager", fullgraph=True)
    small = torch.ones(2, 3, 8, 8)
    for step in range(1001):
        drop.seek(step)
        fast(small).sum().backward()
    model.eval()
    assert torch.equal(fast(X), X)
    assert graphs() == 3


@pytest.mark.parametrize("normalize", ["batch", "sample", "expected", None])
@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("p", [0.1, 0.97])
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


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_memory_format_is_kept(memory_format: torch.memory_format) -> None:
    x = X.contiguous(memory_format=memory_format)
    y = torch.compile(DropBlock(0.2, 3), backend="aot_eager", fullgraph=True)(x)
    assert y.is_contiguous(memory_format=memory_format)


def test_dynamic_shapes() -> None:
    fast = torch.compile(DropBlock(0.3, 3, normalize=None), backend="aot_eager", fullgraph=True, dynamic=True)
    for batch, size in ((16, 20), (24, 20), (17, 24), (32, 12)):
        assert zero_fraction(fast(torch.ones(batch, 16, size, size))) == pytest.approx(0.3, abs=0.02)


def test_one_and_three_axes_and_channel_dim() -> None:
    for layer, shape in (
        (DropBlock(0.3, 3, channel_dim=1, normalize=None), (64, 8, 40)),
        (DropBlock(0.3, 3, normalize=None), (16, 8, 9, 10, 11)),
        (DropBlock(0.3, 3, channel_dim=-1, normalize=None), (16, 20, 20, 16)),
    ):
        fast = torch.compile(layer, backend="aot_eager", fullgraph=True)
        assert zero_fraction(fast(torch.ones(shape))) == pytest.approx(0.3, abs=0.03)


@pytest.mark.parametrize("normalize", ["batch", "sample", "expected"])
@pytest.mark.parametrize("p", [0.3, 0.97])
def test_vmap_draws_a_mask_for_each_slice(normalize: str, p: float) -> None:
    def both(x: torch.Tensor) -> torch.Tensor:
        return vmap(lambda x: drop_block(x, p, 3, normalize=normalize), randomness="different")(x)

    y = torch.compile(both, backend="aot_eager", fullgraph=True)(torch.ones(5, 4, 8, 20, 20))
    assert len({tuple((slice == 0).flatten().tolist()) for slice in y}) == 5
    if normalize == "batch":
        torch.testing.assert_close(y.mean((1, 2, 3, 4)), torch.ones(5))


def test_vmap_over_a_shared_tensor_draws_a_mask_for_each_slice() -> None:
    def ensemble(factors: torch.Tensor) -> torch.Tensor:
        return vmap(lambda a: a * drop_block(torch.ones(4, 8, 20, 20), 0.3, 3), randomness="different")(factors)

    y = torch.compile(ensemble, backend="aot_eager", fullgraph=True)(torch.ones(5))
    assert len({tuple((slice == 0).flatten().tolist()) for slice in y}) == 5


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

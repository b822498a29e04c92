"""Low precision, autocast and memory formats: outputs keep dtype and format, and p is exact."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from hookdrop import DropBlock, GaussianDropout, GaussianNoise, ShapeError, inject
from tests.support.regularizers import EVERY, Case
from tests.support.tensors import HALF


def test_a_regularizer_that_changes_the_dtype_raises() -> None:
    """For example a user's function that multiplies matrices under autocast."""
    model = nn.Sequential(nn.Identity())
    inject(model, matmul_with_itself, layers="0")
    model(x := torch.randn(4, 4))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ShapeError):
        model(x)


def matmul_with_itself(x: torch.Tensor) -> torch.Tensor:
    return x @ x


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("block_size", [1, 3])
def test_dropblock_p_0001_is_exact_in_low_precision(dtype: torch.dtype, block_size: int) -> None:
    """Within 4 standard errors over 10,000 maps."""
    y = DropBlock(0.001, block_size, normalize=None)(torch.ones(100, 100, 14, 14, dtype=dtype))
    fractions = (y == 0).double().mean((2, 3)).flatten()
    assert abs(fractions.mean() - 0.001) < 4 * fractions.std() / 100


@pytest.mark.parametrize("dtype", HALF)
def test_noise_has_the_requested_std_in_low_precision(dtype: torch.dtype) -> None:
    assert GaussianNoise(0.1)(torch.zeros(1000, 1000, dtype=dtype)).double().std() == pytest.approx(0.1, rel=0.01)
    y = GaussianDropout(0.01)(torch.ones(1000, 1000, dtype=dtype)).double()
    assert y.std() == pytest.approx(math.sqrt(0.01 / 0.99), rel=0.01)
    assert y.mean() == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("case", EVERY.values(), ids=EVERY)
def test_default_dtype_has_no_effect(case: Case, default: torch.dtype) -> None:
    """With another default dtype at injection and in training, the masks equal those of float32."""
    results = []
    for dtype in (torch.float32, default):
        torch.manual_seed(0)
        model, x = case.model(), case.input()
        torch.set_default_dtype(dtype)
        try:
            drop = inject(model, case.regularizer, layers=["0", "2"])
            y = model(x)
            y.sum().backward()
        finally:
            torch.set_default_dtype(torch.float32)
        results.append([y.detach(), *[p.grad for p in model.parameters()]])
        assert y.dtype == torch.float32
        drop.remove()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("normalize", ["batch", "sample", "expected"])
def test_more_elements_than_float16_can_count(dtype: torch.dtype, normalize: str) -> None:
    """For samples with more than 65,504 elements, torchvision's DropBlock returns zeros."""
    x = torch.ones(2, 32, 56, 56, dtype=dtype).requires_grad_()
    with torch.autocast("cpu", dtype):
        y = DropBlock(0.1, 7, normalize=normalize)(x)
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
    y = y.detach().double()
    assert torch.equal(grad.double(), y)
    assert (y == 0).double().mean() == pytest.approx(0.1, abs=0.02)
    # Ones times one scale: bfloat16 rounds the product by up to 2**-8.
    assert y.mean() == pytest.approx(1, abs=0.02 if normalize == "expected" else 2**-8)

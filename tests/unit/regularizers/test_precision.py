"""Low precision, autocast and memory formats: outputs keep dtype and format, and p is exact."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from hookdrop import (
    DropBlock,
    Dropout,
    Dropout1d,
    Dropout2d,
    Dropout3d,
    DropPath,
    GaussianDropout,
    GaussianNoise,
    Regularizer,
    ShapeError,
    inject,
)
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


UNITS: dict[Callable[[float], Regularizer], tuple[tuple[int, ...], tuple[int, ...]]] = {
    Dropout: ((100, 10_000), ()),
    Dropout1d: ((1000, 1000, 2), (2,)),
    Dropout2d: ((1000, 1000, 1, 2), (2, 3)),
    Dropout3d: ((1000, 1000, 1, 1, 2), (2, 3, 4)),
    DropPath: ((1_000_000, 2), (1,)),
    partial(DropBlock, block_size=1, normalize="expected"): ((100, 50, 14, 14), ()),
}


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("p", [0.001, 0.003])
@pytest.mark.parametrize("cls", UNITS, ids=lambda cls: getattr(cls, "__name__", "DropBlock"))
def test_zeroed_fraction_is_p_and_the_mean_is_kept(
    cls: Callable[[float], Regularizer], p: float, dtype: torch.dtype
) -> None:
    """Within 4 standard errors of whole units. In bfloat16, `rand < .999` would drop nothing, and .997 rounds to 1."""
    shape, inside = UNITS[cls]
    x = (1 + torch.rand(shape)).to(dtype)
    zero = (y := cls(p)(x)) == 0
    units = zero.all(inside) if inside else zero
    assert abs(units.double().mean() - p) < 4 * math.sqrt(p * (1 - p) / units.numel())
    assert torch.equal(zero.any(inside) if inside else zero, units)
    assert p == 0.001 or y.double().mean() / x.double().mean() == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_noise_has_the_requested_std(dtype: torch.dtype) -> None:
    assert GaussianNoise(0.1)(torch.zeros(1000, 1000, dtype=dtype)).double().std() == pytest.approx(0.1, rel=0.01)
    for p in (0.01, 0.2):  # the variance of dropout
        y = GaussianDropout(p)(torch.ones(1000, 1000, dtype=dtype)).double()
        assert y.std() == pytest.approx(math.sqrt(p / (1 - p)), rel=0.01)
        assert y.mean() == pytest.approx(1, abs=2e-3)


def test_drop_path_batch_mode_drops_all_or_nothing() -> None:
    drops = [(DropPath(0.5, mode="batch")(torch.ones(8, 3)) == 0).float().mean().item() for _ in range(200)]
    assert set(drops) == {0.0, 1.0}
    assert 60 < sum(drops) < 140


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

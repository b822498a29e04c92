"""What MixStyle and DSU share: precision, batches of one sample, and maps without a style."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hookdrop import DSU, HookdropWarning, MixStyle, Regularizer, ShakeDrop, inject
from tests.support.tensors import HALF, styled

STYLES = pytest.mark.parametrize("cls", [MixStyle, DSU], ids=lambda cls: cls.__name__)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("regularizer", [MixStyle(1.0), DSU(1.0), ShakeDrop(0.5)], ids=repr)
def test_low_precision_rounds_only_the_result(regularizer: Regularizer, dtype: torch.dtype) -> None:
    """Statistics in float16 would lose a variance of 1e-6, and have a relative error of 1/2,000 in the mean."""
    x = styled(dtype=dtype)
    torch.manual_seed(3)
    found = regularizer(x)
    torch.manual_seed(3)
    torch.testing.assert_close(found, regularizer(x.float()).to(dtype), rtol=0, atol=0)


@STYLES
def test_unchanged_batches_are_bitwise_unchanged(cls: type[Regularizer]) -> None:
    x = (styled() * 1e4 + 0.1).requires_grad_()
    same = [y for y in (cls(0.2)(x) for _ in range(50)) if torch.equal(y, x)]
    assert len(same) > 25
    assert all(torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.ones_like(x)) for y in same)


@STYLES
def test_a_batch_of_one_warns(cls: type[Regularizer]) -> None:
    model, x = nn.Sequential(nn.Identity()), styled(1)
    inject(model, cls(1.0), layers="0")
    with pytest.warns(HookdropWarning, match="a batch of one sample has a single style"):
        y = model(x)
    torch.testing.assert_close(y, x)


@STYLES
def test_constant_maps_stay_finite(cls: type[Regularizer]) -> None:
    x = torch.full((4, 2, 3, 3), 7.0, requires_grad=True)
    y = cls(1.0)(x)
    y.sum().backward()
    torch.testing.assert_close(y, x, atol=0.01, rtol=0)
    assert x.grad.isfinite().all()

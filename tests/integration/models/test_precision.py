"""Low precision under autocast: the rate and the scale stay exact."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hookdrop import DropBlock, inject
from tests.support.precision import HALF


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("normalize", ["batch", "sample", "expected"])
def test_more_elements_than_float16_can_count(dtype: torch.dtype, normalize: str) -> None:
    """For samples with more than 65,504 elements, torchvision's DropBlock returns zeros."""
    model = nn.Sequential(nn.Identity())
    inject(model, DropBlock(0.1, 7, normalize=normalize), layers="0")
    x = torch.ones(2, 32, 56, 56, dtype=dtype).requires_grad_()
    with torch.autocast("cpu", dtype):
        y = model(x)
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
    y = y.detach().double()
    assert torch.equal(grad.double(), y)
    assert (y == 0).double().mean() == pytest.approx(0.1, abs=0.02)
    # Ones times one scale: bfloat16 rounds the product by up to 2**-8.
    assert y.mean() == pytest.approx(1, abs=0.02 if normalize == "expected" else 2**-8)

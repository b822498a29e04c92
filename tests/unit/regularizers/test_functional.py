"""hookdrop's dropout gives the same masks as PyTorch's functions with the same seed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hookdrop import (
    AlphaDropout,
    Dropout,
    Dropout1d,
    Dropout2d,
    Dropout3d,
    FeatureAlphaDropout,
    Regularizer,
)

THEIRS: dict[str, tuple[Callable[[float], Regularizer], Callable[[Tensor, float], Tensor], tuple[int, ...]]] = {
    "Dropout": (Dropout, lambda x, p: F.dropout(x, p), (4, 6, 8, 8)),
    "Dropout1d": (Dropout1d, lambda x, p: F.dropout1d(x, p), (64, 32, 5)),
    "Dropout2d": (Dropout2d, lambda x, p: F.dropout2d(x, p), (64, 32, 3, 4)),
    "Dropout3d": (Dropout3d, lambda x, p: F.dropout3d(x, p), (64, 32, 2, 3, 4)),
    "AlphaDropout": (AlphaDropout, lambda x, p: F.alpha_dropout(x, p, True), (64, 32, 3, 4)),
    "FeatureAlphaDropout": (FeatureAlphaDropout, lambda x, p: F.feature_alpha_dropout(x, p, True), (64, 32, 3, 4)),
}


@pytest.mark.parametrize("p", [0.0, 0.1, 0.25, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("name", THEIRS)
def test_matches_torch_functional_with_the_same_seed(name: str, p: float) -> None:
    """The masks are equal, and the rest is equal up to the last bit of 1 / (1 - p)."""
    ours, theirs, shape = THEIRS[name]
    x = torch.randn(shape) + 4.0
    torch.manual_seed(3)
    wanted = theirs(x, p)
    torch.manual_seed(3)
    got = ours(p).train()(x)
    assert torch.equal(got == 0, wanted == 0)
    torch.testing.assert_close(got, wanted, rtol=2.0**-22, atol=0.0)

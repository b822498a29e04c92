"""`hookdrop.functional`: the masks of PyTorch's functions with the same seed, and invalid rates."""

from __future__ import annotations

import math
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
    functional,
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


SHAPE_OF = {
    "dropout1d": (2, 3, 4),
    "dropout3d": (2, 3, 4, 4, 4),
    "token_dropout": (2, 3, 4),
    "locked_dropout": (2, 3, 4),
    "head_dropout": (8, 3, 4),
    "neftune": (2, 3, 4),
    "masksembles": (2, 12),
}
ARGUMENTS = {
    "cutout": (3, 0.5),
    "head_dropout": (0.5, 2),
    "layer_drop": (torch.zeros(2, 3, 4, 4), 0.5),
    "masksembles": (2,),
    "mixout": (torch.zeros(2, 3, 4, 4), 0.5),
}
"""Those after the input; for the others, the rate."""


ONES = {name: torch.ones(SHAPE_OF.get(name, (2, 3, 4, 4)), requires_grad=True) for name in functional.__all__}


BAD = {
    "cutout": ((3, -0.5), "p must lie in"),
    "head_dropout": ((-0.5, 2), "p must lie in"),
    "layer_drop": ((torch.zeros(2, 3, 4, 4), -0.5), "p must lie in"),
    "mixout": ((torch.zeros(2, 3, 4, 4), -0.5), "p must lie in"),
    "clip_activation_grad": ((-0.5,), "max_norm must be above 0, got -0.5"),
    "clamp_activation_grad": ((0.5, -0.5), "min must not be above max, got min=0.5 and max=-0.5"),
    "scale_activation_grad": ((math.inf,), "factor must be finite"),
    "masksembles": ((2, 0.5), r"scale must lie in \[1, 6\], got 0.5"),
}


@pytest.mark.parametrize("name", functional.__all__)
def test_functions_validate_their_rate(name: str) -> None:
    args, says = BAD.get(name, ((-0.5,), f"{name}: .* must lie in"))
    with pytest.raises(ValueError, match=says):
        getattr(functional, name)(ONES[name], *args)


@pytest.mark.parametrize("name", functional.__all__)
def test_functions_return_the_input_when_not_training(name: str) -> None:
    args = ARGUMENTS.get(name, (0.5,))
    assert getattr(functional, name)(ONES[name], *args, training=False) is ONES[name]
    assert getattr(functional, name)(ONES[name], *args) is not ONES[name]

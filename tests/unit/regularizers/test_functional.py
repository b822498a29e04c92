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
    **dict.fromkeys(("dropout1d", "token_dropout", "locked_dropout", "neftune", "activation_penalty"), (2, 3, 4)),
    "dropout3d": (2, 3, 4, 4, 4), "head_dropout": (8, 3, 4), "masksembles": (2, 12),
}  # fmt: skip
HALVES = torch.zeros(2, 3, 4, 4)
ARGUMENTS = {
    "cutout": (3, 0.5),
    "head_dropout": (0.5, 2),
    "layer_drop": (HALVES, 0.5),
    "masksembles": (2,),
    "mixout": (HALVES, 0.5),
}
"""Those after the input; for the others, the rate."""
INVALID = {
    "cutout": (3, -0.5), "head_dropout": (-0.5, 2), "layer_drop": (HALVES, -0.5), "clamp_activation_grad": (0.5, -0.5),
    "scale_activation_grad": (math.inf,), "masksembles": (2, 0.5), "mixout": (HALVES, -0.5),
}  # fmt: skip


@pytest.mark.parametrize("name", functional.__all__)
def test_functions_validate_their_rate_and_return_the_input_when_not_training(name: str) -> None:
    function, x = getattr(functional, name), torch.ones(SHAPE_OF.get(name, (2, 3, 4, 4)), requires_grad=True)
    with pytest.raises(ValueError):
        function(x, *INVALID.get(name, (-0.5,)))
    arguments = ARGUMENTS.get(name, (0.5,))
    if name != "activation_penalty":  # a loss term
        assert function(x, *arguments, training=False) is x
        assert function(x, *arguments) is not x

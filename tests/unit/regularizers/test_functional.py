"""Dropout and its settings against PyTorch's functions with the same seed, shared masks, and `hookdrop.functional`."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations

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
    LockedDropout,
    Regularizer,
    functional,
    plan,
)
from hookdrop.functional import dropout
from tests.support.models import Small
from tests.support.tensors import within

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


SHAPE = (3, 4, 5, 6)
AXES = [axes for size in (1, 2, 3, 4) for axes in combinations(range(4), size)]


def seeded(regularizer: Regularizer, x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return regularizer(x)


@pytest.mark.parametrize("shared", AXES)
def test_positions_along_the_shared_axes_have_one_mask_and_others_are_independent(shared: tuple[int, ...]) -> None:
    """The fraction of dropped slices is within 4 standard errors over all slices of 400 calls."""
    one = Dropout(0.3, shared=shared)
    torch.manual_seed(0)
    masks = torch.stack([one(torch.ones(SHAPE)) == 0 for _ in range(400)])
    slices = masks.amin([axis + 1 for axis in shared], keepdim=True)
    assert torch.equal(masks, slices.expand_as(masks))
    assert within(slices.double().mean(), 0.3, math.sqrt(0.21), slices.numel())
    for axis in set(range(4)) - set(shared):
        assert (slices.amin(axis + 1) != slices.amax(axis + 1)).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "shared", "shape"),
    [
        (Dropout1d(0.3), (2,), (3, 4, 5)),
        (Dropout2d(0.3), (2, 3), SHAPE),
        (Dropout2d(0.3), (-1, -2), SHAPE),
        (Dropout3d(0.3), [2, 3, 4], (3, 4, 5, 6, 7)),
        (LockedDropout(0.3), 1, (3, 4, 5)),
        (LockedDropout(0.3, 0), (-3,), (3, 4, 5)),
    ],
)
def test_the_named_classes_are_settings(
    name: Regularizer, shared: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = torch.randn(shape, dtype=dtype)
    expected = seeded(name, x)
    torch.testing.assert_close(seeded(Dropout(0.3, shared=shared), x), expected, rtol=2**-22, atol=0.0)
    torch.manual_seed(3)
    assert torch.equal(dropout(x, 0.3, shared=name.shared), expected)


def test_plan_shows_the_shared_axes_and_warns_about_channels_last(model: Small, images: Tensor) -> None:
    shown = plan(model, Dropout(0.1, shared=(-2, 3)), layers="conv1", example_input=images)
    assert shown.sites[0].reading == "one mask for 16x16 (axes -2, 3)"
    (warning,) = Dropout(0.1, shared=(2, 3)).shape_warnings((2, 7, 7, 96))
    assert "looks like NHWC" in warning
    assert Dropout(0.1, shared=(1, 2)).shape_warnings((2, 7, 7, 96)) == []


@pytest.mark.parametrize(("shared", "alone"), [((), True), ((1, 2), True), ((0,), False), ((1, -4), False)])
def test_samples_are_independent_unless_they_share_a_mask(shared: tuple[int, ...], alone: bool) -> None:
    one = Dropout(0.1, shared=shared)
    assert one.independent_samples is alone
    assert repr(one) == (f"Dropout(p=0.1, shared={shared})" if shared else "Dropout(p=0.1)")
    assert Dropout(0.1, shared=1).shared == (1,)

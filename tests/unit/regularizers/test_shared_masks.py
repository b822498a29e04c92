"""`Dropout(p, shared=axes)`: one mask along axes, of which Dropout1d to 3d and LockedDropout are settings."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch
from torch import Tensor

from hookdrop import Dropout, Dropout1d, Dropout2d, Dropout3d, LockedDropout, Regularizer, plan
from hookdrop.functional import dropout
from tests.support.models import Small
from tests.support.tensors import within

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

"""Dropout against PyTorch's functions, shared masks, `hookdrop.functional`; DropBlock's rates and axes; Cutout's squares."""

import inspect
import itertools
import math
from collections.abc import Callable
from functools import partial
from itertools import combinations
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from torch import Tensor

import hookdrop
from hookdrop import Cutout, Dropout, Dropout2d, Dropout3d, FeatureAlphaDropout, Regularizer, functional, plan
from hookdrop.functional import drop_block, dropout
from hookdrop.kernels.blocks import gamma_for
from tests.statistics.test_masks import reach
from tests.support.models import Small
from tests.support.tensors import within
from tests.support.training import seeded

THEIRS: dict[str, tuple[Callable[[float], Regularizer], Callable[[Tensor, float], Tensor], tuple[int, ...]]] = {
    "Dropout": (Dropout, lambda x, p: F.dropout(x, p), (4, 6, 8, 8)),
    "Dropout1d": (hookdrop.Dropout1d, lambda x, p: F.dropout1d(x, p), (64, 32, 5)),
    "Dropout2d": (Dropout2d, lambda x, p: F.dropout2d(x, p), (64, 32, 3, 4)),
    "Dropout3d": (Dropout3d, lambda x, p: F.dropout3d(x, p), (64, 32, 2, 3, 4)),
    "AlphaDropout": (hookdrop.AlphaDropout, lambda x, p: F.alpha_dropout(x, p, True), (64, 32, 3, 4)),
    "FeatureAlphaDropout": (FeatureAlphaDropout, lambda x, p: F.feature_alpha_dropout(x, p, True), (64, 32, 3, 4)),
}


@pytest.mark.parametrize("p", [0.0, 0.1, 0.25, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("name", THEIRS)
def test_matches_torch_functional_with_the_same_seed(name: str, p: float) -> None:
    """The masks are equal, and the rest is equal up to the last bit of 1 / (1 - p)."""
    ours, theirs, shape = THEIRS[name]
    x = torch.randn(shape) + 4.0
    wanted, got = seeded(theirs, x, p), seeded(ours(p).train(), x)
    assert torch.equal(got == 0, wanted == 0)
    torch.testing.assert_close(got, wanted, rtol=2.0**-22, atol=0.0)


SHAPE_OF = {
    **dict.fromkeys(("dropout1d", "token_dropout", "locked_dropout", "neftune", "activation_penalty"), (2, 3, 4)),
    "dropout3d": (2, 3, 4, 4, 4), "head_dropout": (8, 3, 4), "masksembles": (2, 12),
}  # fmt: skip
HALVES = torch.zeros(2, 3, 4, 4)
ARGUMENTS = {
    "cutout": (3, 0.5), "head_dropout": (0.5, 2), "layer_drop": (HALVES, 0.5), "masksembles": (2,), "mixout": (HALVES, 0.5),
}  # fmt: skip
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


def test_functions_have_the_default_settings_of_the_classes() -> None:
    classes = {name.lower(): getattr(hookdrop, name) for name in hookdrop.__all__}
    different = []
    for name in functional.__all__:
        settings = inspect.signature(classes[name.replace("_", "")]).parameters
        for key, one in inspect.signature(getattr(functional, name)).parameters.items():
            if key in settings and one.default not in (one.empty, settings[key].default):
                different.append((name, key))
    assert different == [("drop_block", "p"), ("neftune", "attention_mask")]


SHAPE = (3, 4, 5, 6)
SIZES = st.lists(st.integers(1, 60), min_size=1, max_size=3).map(tuple)
AXES = [axes for size in (1, 2, 3, 4) for axes in combinations(range(4), size)]


@pytest.mark.parametrize("shared", AXES)
def test_positions_along_the_shared_axes_have_one_mask_and_others_are_independent(shared: tuple[int, ...]) -> None:
    """The fraction of dropped slices is within 4 standard errors over all slices of 400 calls."""
    one = Dropout(0.3, shared=shared)
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
        (hookdrop.Dropout1d(0.3), (2,), (3, 4, 5)),
        (Dropout2d(0.3), (2, 3), SHAPE),
        (Dropout2d(0.3), (-1, -2), SHAPE),
        (Dropout3d(0.3), [2, 3, 4], (3, 4, 5, 6, 7)),
        (hookdrop.LockedDropout(0.3), 1, (3, 4, 5)),
        (hookdrop.LockedDropout(0.3, 0), (-3,), (3, 4, 5)),
    ],
)
def test_the_named_classes_are_settings(name: Regularizer, shared: Any, shape: Any, dtype: torch.dtype) -> None:
    x = torch.randn(shape, dtype=dtype)
    expected = seeded(name, x)
    torch.testing.assert_close(seeded(Dropout(0.3, shared=shared), x), expected, rtol=2**-22, atol=0.0)
    assert torch.equal(seeded(dropout, x, 0.3, shared=name.shared), expected)


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


def test_a_block_larger_than_the_map_covers_it() -> None:
    for size, block, edges in (((4, 4), 99, (4, 4)), ((5, 9), 7, (5, 7)), ((6,), 8, (6,))):
        x = torch.ones(4, 8, *size)
        assert torch.equal(*(seeded(drop_block, x, 0.3, given, channel_dim=1) for given in (block, edges)))


@given(size=SIZES, block=st.integers(1, 20), p=st.floats(1e-6, 1 - 1e-6))
def test_exact_gamma_solves_its_equation(size: tuple[int, ...], block: int, p: float) -> None:
    """The dropped fraction, as a plain sum over positions, equals p."""
    blocks = tuple(min(block, s) for s in size)
    gamma = gamma_for(size, blocks, p)
    dropped = -torch.expm1(reach(size, blocks) * math.log1p(-gamma)).mean().item()
    assert 0 < gamma < 1
    assert dropped == pytest.approx(p, rel=1e-9)


@pytest.mark.parametrize(("p", "ratio"), [(0.1, 1.08), (0.25, 1.24), (0.5, 1.68)])
def test_paper_gamma_drops_less_than_p(p: float, ratio: float) -> None:
    paper = gamma_for((14, 14), (7, 7), p, "paper")
    assert paper == pytest.approx(p / 49 * 196 / 64)
    assert gamma_for((14, 14), (7, 7), p) / paper == pytest.approx(ratio, abs=0.005)


@pytest.mark.parametrize("normalize", ["batch", "sample"])
def test_batch_and_sample_normalization_keep_the_mean_exactly(normalize: str) -> None:
    """For a tensor of ones, count / kept count restores the sum."""
    y = drop_block(torch.ones(6, 5, 12, 12, dtype=torch.float64), 0.4, 5, normalize=normalize)
    over = (0, 1, 2, 3) if normalize == "batch" else (1, 2, 3)
    ratio = y.mean(over)
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=1e-6, atol=0)


def test_other_normalizations_scale_by_a_constant() -> None:
    for normalize, kept in (("expected", 1.25), (None, 1.0)):
        y = drop_block(torch.ones(6, 5, 12, 12, dtype=torch.float64), 0.2, 5, normalize=normalize)
        assert set(y.unique().tolist()) == {0.0, kept}


def test_a_fully_dropped_sample_gives_zeros_not_nan() -> None:
    y = drop_block(torch.ones(64, 1, 3, 3), 0.9, 3, normalize="sample")
    assert y.isfinite().all()
    assert (y.flatten(1).sum(1) == 0).any()


def test_other_axes_give_the_same_masks() -> None:
    """With the same seed: channels last, and axes of length 1."""
    drawn = partial(seeded, drop_block, p=0.3)
    x = torch.randn(4, 6, 9, 11)
    last = drawn(x.permute(0, 2, 3, 1), block_size=3, channel_dim=-1)
    assert torch.equal(last.permute(0, 3, 1, 2), drawn(x, block_size=3))
    x = torch.ones(4, 6, 20)
    one = drawn(x, block_size=5, channel_dim=1)
    assert torch.equal(one, drawn(x.unsqueeze(2), block_size=(1, 5)).squeeze(2))
    assert torch.equal(one, drawn(x[:, :, None, None], block_size=(1, 1, 5)).squeeze(2).squeeze(2))


def expected_fraction(size: int, length: int) -> float:
    """Along one axis: the mean part of the axis that a window covers, over all centers."""
    lengths = [min(center - size // 2 + size, length) - max(center - size // 2, 0) for center in range(length)]
    return sum(lengths) / length**2


class TestCutout:
    @pytest.mark.parametrize(("size", "length"), list(itertools.product([1, 2, 3, 6, 7], [7, 8])))
    def test_docstring_formula_for_the_expected_fraction(self, size: int, length: int) -> None:
        assert (size * length - size**2 // 4) / length**2 == pytest.approx(expected_fraction(size, length))

    @pytest.mark.parametrize("p", [1.0, 0.3])
    @pytest.mark.parametrize("size", [1, 4, 5, 12, (3, 6)])
    def test_zeroed_fraction_matches_the_formula(self, size: int | tuple[int, int], p: float) -> None:
        height, width = (size, size) if isinstance(size, int) else size
        fraction = (Cutout(size, p)(torch.ones(40_000, 1, 8, 10)) == 0).double().mean((1, 2, 3))
        expected = p * expected_fraction(height, 8) * expected_fraction(width, 10)
        assert within(fraction.mean(), expected, fraction.std().item(), 40_000)

    def test_zeros_one_square_in_all_channels_without_rescaling(self) -> None:
        y = Cutout(3)(torch.full((500, 4, 9, 9), 2.0))
        assert set(y.unique().tolist()) == {0.0, 2.0}
        assert torch.equal(y, y[:, :1].expand_as(y))
        rows, columns = ((y[:, 0] == 0).any(axis) for axis in (2, 1))
        assert torch.equal(y[:, 0] == 0, rows[:, :, None] & columns[:, None, :])
        for hit in (rows, columns):
            runs = ["".join("01"[cut] for cut in one).strip("0") for one in hit.tolist()]
            assert set(runs) == {"11", "111"}  # at the border one of three rows is cut off

    def test_centers_are_uniform(self) -> None:
        """With size 1 the zeroed pixel is the center: each of the 30 pixels within 5 standard errors."""
        hit = (Cutout(1)(torch.ones(60_000, 1, 5, 6)) == 0)[:, 0].double()
        assert (hit.sum((1, 2)) == 1).all()
        assert (hit.mean(0) - 1 / 30).abs().max() < 5 * math.sqrt(1 / 30 / 60_000)

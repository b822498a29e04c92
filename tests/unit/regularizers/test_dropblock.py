"""DropBlock: the zeroed fraction, the seed rate, normalization and shapes; the distribution of Cutout's squares."""

from __future__ import annotations

import itertools
import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from hookdrop import Cutout
from hookdrop.functional import drop_block
from hookdrop.kernels.blocks import gamma_for
from tests.support.tensors import within


def mean_and_error(maps: torch.Tensor) -> tuple[float, float]:
    """Mean zeroed fraction over independent maps (rows), and its standard error."""
    fractions = (maps == 0).double().flatten(1).mean(1)
    return fractions.mean().item(), (fractions.std() / math.sqrt(len(fractions))).item()


SHAPES_AND_BLOCKS = [
    ((14, 14), 7),
    ((8, 8), 4),  # an even block
    ((7, 7), 7),  # covers the map
    ((5, 9), 7),  # larger than one axis
    ((4, 4), 99),  # larger than the map
    ((6, 17), (2, 5)),  # neither is square
    ((6,), 8),
    ((4, 8, 8), (1, 3, 5)),
]


@pytest.mark.parametrize("p", [0.05, 0.3, 0.9])
@pytest.mark.parametrize(("size", "block"), SHAPES_AND_BLOCKS)
def test_zeroed_fraction_is_p(size: tuple[int, ...], block: int | tuple[int, ...], p: float) -> None:
    """Within 4 standard errors, over 4,000 independent maps."""
    x = torch.ones(40, 100, *size)
    y = drop_block(x, p, block, normalize=None, channel_dim=1)
    mean, error = mean_and_error(y.flatten(0, 1))
    assert abs(mean - p) < 4 * error
    assert error < 0.01


@given(
    size=st.lists(st.integers(1, 60), min_size=1, max_size=3).map(tuple),
    block=st.integers(1, 20),
    p=st.floats(1e-6, 1 - 1e-6),
)
def test_exact_gamma_solves_its_equation(size: tuple[int, ...], block: int, p: float) -> None:
    """The dropped fraction, as a plain sum over positions, equals p."""
    blocks = tuple(min(block, s) for s in size)
    gamma = gamma_for(size, blocks, p)
    along = [
        torch.tensor([min(i, s - b) - max(0, i - b + 1) + 1 for i in range(s)], dtype=torch.float64)
        for s, b in zip(size, blocks, strict=True)
    ]
    covers = along[0]
    for axis in along[1:]:
        covers = covers.unsqueeze(-1) * axis
    dropped = -torch.expm1(covers * math.log1p(-gamma)).mean().item()
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

    def drawn(x: torch.Tensor, *settings: object, **more: object) -> torch.Tensor:
        torch.manual_seed(3)
        return drop_block(x, 0.3, *settings, **more)

    x = torch.randn(4, 6, 9, 11)
    assert torch.equal(drawn(x.permute(0, 2, 3, 1), 3, channel_dim=-1).permute(0, 3, 1, 2), drawn(x, 3))
    x = torch.ones(4, 6, 20)
    one = drawn(x, 5, channel_dim=1)
    assert torch.equal(one, drawn(x.unsqueeze(2), (1, 5)).squeeze(2))
    assert torch.equal(one, drawn(x[:, :, None, None], (1, 1, 5)).squeeze(2).squeeze(2))


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

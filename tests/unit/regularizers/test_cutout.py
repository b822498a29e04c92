"""The distribution of Cutout's squares."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from hookdrop import Cutout
from tests.support.tensors import within


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

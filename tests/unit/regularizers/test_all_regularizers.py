"""All regularizers as layers: rates and statistics. test_invalid_arguments.py has what they refuse."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from hookdrop import (
    AlphaDropout,
    Dropout,
    Dropout1d,
    Dropout2d,
    Dropout3d,
    DropPath,
    GaussianDropout,
    GaussianNoise,
    Regularizer,
)


def test_bfloat16_keeps_the_mean_unlike_torch() -> None:
    """1 / (1 - .003) rounds to 1 in bfloat16, so torch loses 0.3% of the mean."""
    x = (1 + torch.rand(1_000_000)).bfloat16()
    ours, theirs = (y.double().mean() / x.double().mean() for y in (Dropout(0.003)(x), nn.functional.dropout(x, 0.003)))
    assert theirs == pytest.approx(0.997, abs=5e-4)
    assert ours == pytest.approx(1, abs=1e-3)


def test_drop_path_batch_mode_drops_all_or_nothing() -> None:
    drops = [(DropPath(0.5, mode="batch")(torch.ones(8, 3)) == 0).float().mean().item() for _ in range(200)]
    assert set(drops) == {0.0, 1.0}
    assert 60 < sum(drops) < 140


def test_alpha_dropout_keeps_mean_and_variance() -> None:
    x = torch.randn(1_000_000)
    y = AlphaDropout(0.2)(x)
    assert y.mean().abs() < 0.01
    assert y.var() == pytest.approx(1, abs=0.01)


def test_gaussian_dropout_has_the_variance_of_dropout() -> None:
    y = GaussianDropout(0.2)(torch.ones(1_000_000))
    assert y.var() == pytest.approx(0.2 / 0.8, rel=0.01)


def test_gaussian_noise_has_the_given_std() -> None:
    y = GaussianNoise(0.7)(torch.full((1_000_000,), 3.0))
    assert y.std() == pytest.approx(0.7, rel=0.01)


UNITS = {
    Dropout: ((100, 10_000), None),
    Dropout1d: ((1000, 1000, 2), (2,)),
    Dropout2d: ((1000, 1000, 1, 2), (2, 3)),
    Dropout3d: ((1000, 1000, 1, 1, 2), (2, 3, 4)),
    DropPath: ((1_000_000, 2), (1,)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("p", [0.001, 0.1, 0.5])
@pytest.mark.parametrize("cls", UNITS, ids=lambda cls: cls.__name__)
def test_zeroed_fraction_is_p(cls: type[Regularizer], p: float, dtype: torch.dtype) -> None:
    """Within 4 standard errors over a million draws of whole units. `rand < .999` in bfloat16 would drop nothing."""
    shape, inside = UNITS[cls]
    zero = cls(p)(torch.ones(shape, dtype=dtype)) == 0
    units = zero if inside is None else zero.all(inside)
    assert abs(units.double().mean() - p) < 4 * math.sqrt(p * (1 - p) / 1e6)
    assert inside is None or torch.equal(zero.any(inside), units)

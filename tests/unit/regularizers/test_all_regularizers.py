"""All regularizers as layers: rates, statistics, settings and invalid arguments."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hookdrop import AlphaDropout, Dropout, DropPath, GaussianDropout, GaussianNoise
from hookdrop.regularizers import rows_alone
from tests.support.regularizers import FORWARD, OWN


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


def test_regularizers_without_independent_samples() -> None:
    """They draw once for the batch, mix its samples, or scale by what is kept of the whole batch."""
    dependent = {name for name, case in FORWARD.items() if name in OWN and not rows_alone(case.regularizer)}
    assert {"DropPath (batch)", "MixStyle", "DropBlock (sparse)"} <= dependent

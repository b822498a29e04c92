"""The distribution of UniformNoise, and how noise is reported."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from hookdrop import (
    GaussianNoise,
    LinearSchedule,
    UniformNoise,
    inject,
)
from tests.support.models import ROWS, pair


class TestUniformNoise:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("beta", [0.05, 0.3, 1.0])
    def test_is_uniform_within_plus_minus_beta(self, beta: float, dtype: torch.dtype) -> None:
        """Mean, variance and deciles over a million draws. Low precision rounds by at most 2**-8."""
        r = (UniformNoise(beta)(torch.ones(1_000_000, dtype=dtype)).double() - 1) / beta
        rounding = torch.finfo(dtype).eps / beta
        assert r.abs().max() <= 1 + rounding
        assert abs(r.mean()) <= 4 / math.sqrt(3e6) + rounding / 4
        assert r.var().item() == pytest.approx(1 / 3, rel=0.01, abs=2 * rounding**2)
        if dtype == torch.float32:
            tenths = torch.histc(r, 10, -1, 1) / 1e6
            assert (tenths - 0.1).abs().max() < 4 * math.sqrt(0.09 / 1e6)


class TestNoiseReporting:
    def test_metrics_repr_and_probe_report_std(self) -> None:
        drop = inject(model := pair(), GaussianNoise(2.0), layers="*.0", schedule=LinearSchedule(2))
        drop.step()
        assert drop.metrics() == {
            "hookdrop/gaussiannoise/std": 1.0, "hookdrop/gaussiannoise/step": 1.0, "hookdrop/gaussiannoise/enabled": 1.0,
        }  # fmt: skip
        assert drop.keep_prob is None
        assert "std=1 of 2" in repr(drop)
        row = str(drop.probe(ROWS)).splitlines()[2].split()
        assert row[:3] == ["0.0", "1.000", "-"]
        assert model is not None

    def test_probe_of_a_function_shows_no_rate(self) -> None:
        drop = inject(model := pair(), nn.functional.dropout, layers="*.0")
        row = str(drop.probe(ROWS)).splitlines()[2].split()
        assert row[:2] == ["0.0", "-"]
        assert float(row[2]) == pytest.approx(0.5, abs=0.05)
        assert model is not None

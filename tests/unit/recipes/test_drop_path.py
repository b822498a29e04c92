"""Rates of DropPath by depth."""

from __future__ import annotations

import pytest
import torch

from hookdrop import DropPath, inject
from tests.support.nets import Small


def test_depth_from_zero_scales_rates_like_timms_linspace(model: Small) -> None:
    drop = inject(model, DropPath(0.3), layers="layer?.*", p_scale="depth_from_zero")
    expected = torch.linspace(0, 0.3, 4, dtype=torch.float64).tolist()
    assert [site.p for site in drop.sites] == pytest.approx(expected)

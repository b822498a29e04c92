"""Rate updates of compiled models."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from hookdrop import DropBlock, HookdropWarning, LinearSchedule, inject


def test_a_warning_raised_as_an_error_does_not_interrupt_rate_updates() -> None:
    """All rates are set before any warning is raised."""
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Conv2d(2, 2, 1))
    drop = inject(model, DropBlock(0.5, 7), layers="*", schedule=LinearSchedule(4))
    torch.compile(model, backend="eager")(torch.ones(1, 1, 4, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(HookdropWarning, match="covers the whole 4x4 map"):
            drop.seek(2)
    assert [site.p for site in drop.sites] == [0.25, 0.25]

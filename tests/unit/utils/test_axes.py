"""How tensor axes are interpreted."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hookdrop import (
    DropBlock,
    Dropout,
    Dropout2d,
    DropPath,
    FeatureAlphaDropout,
    plan,
)
from tests.support.nets import Small


@pytest.mark.parametrize(
    ("regularizer", "reading"),
    [
        (DropPath(0.1), "N=4"),
        (Dropout2d(0.1), "C=8 H=16 W=16"),
        (FeatureAlphaDropout(0.1), "C=8 H=16 W=16"),
        (DropBlock(0.1, 3), "C=8 H=16 W=16"),
        (Dropout(0.1), ""),
    ],
    ids=lambda value: repr(value),
)
def test_plan_shows_how_axes_are_interpreted(
    model: Small, images: torch.Tensor, regularizer: nn.Module, reading: str
) -> None:
    drafted = plan(model, regularizer, layers="layer1.*", example_input=images)
    assert {site.reading for site in drafted.sites} == {reading}

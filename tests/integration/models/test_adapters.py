"""Rates of regularizers from PyTorch, torchvision and timm."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hookdrop import LinearSchedule, inject
from tests.support.nets import Small


class TestForeignModules:
    """Regularizer modules of other libraries."""

    @pytest.mark.parametrize(
        "make",
        [
            lambda: nn.Dropout2d(0.4),
            lambda: nn.Dropout(0.4, inplace=True),
            lambda: __import__("torchvision").ops.StochasticDepth(0.4, "row"),
            lambda: __import__("torchvision").ops.DropBlock2d(0.4, 3),
            lambda: __import__("timm").layers.DropPath(0.4),
        ],
    )
    def test_schedule_controls_the_rate(self, make: object, model: Small, images: torch.Tensor) -> None:
        theirs = make()
        drop = inject(model, theirs, layers="layer1.*.bn1", schedule=LinearSchedule(4))
        assert drop.sites[0].p == 0
        drop.step(4)
        with drop.measuring() as m:
            for _ in range(40):
                model(images)
        assert drop.p == 0.4
        assert m.dropped == pytest.approx(0.4, abs=0.08)
        assert "0.4" in repr(theirs), "the module that was passed in was changed"

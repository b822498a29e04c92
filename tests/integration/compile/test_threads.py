"""Compiled models leak no objects."""

from __future__ import annotations

import pytest
import torch

from hookdrop import (
    DropBlock,
    inject,
)
from tests.support.threads import X, no_leaks, pair, zeroed


@pytest.mark.filterwarnings("ignore:code compiled:hookdrop.HookdropWarning")
def test_compiled_model_leaks_nothing() -> None:
    model = pair()
    with no_leaks(model, torch.optim.SGD(model.parameters(), 0.01)):
        fast = torch.compile(model, backend="eager")
        for _ in range(3):
            with inject(model, DropBlock(0.5, 1, channel_dim=-1), layers="1"):
                assert zeroed(fast(X.view(8, 8, 8))) > 0.3
        assert zeroed(fast(X.view(8, 8, 8))) == 0.0

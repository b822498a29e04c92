"""Warnings during training."""

from __future__ import annotations

import pytest
from torch import nn

from hookdrop import (
    Dropout,
    HookdropWarning,
    inject,
)
from hookdrop.diagnostics.training import UPDATES_BEFORE_WARNING
from tests.support.training import optimize


class TestEvalMode:
    def test_model_always_in_eval_mode_warns(self) -> None:
        """As are models from transformers' `from_pretrained`, or with frozen batch norm."""
        model = nn.Sequential(nn.Linear(2, 2)).eval()
        inject(model, Dropout(0.1), layers="0")
        with pytest.warns(HookdropWarning, match="'0' only ran in eval mode"):
            optimize(model, 2 * UPDATES_BEFORE_WARNING)

"""`set_dropout` for recurrent and compiled models."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from hookdrop.recipes import report_dropout, set_dropout


class TestSetDropout:
    @pytest.fixture
    def model(self) -> Any:
        return nn.Sequential(nn.Dropout(0.1), nn.LSTM(4, 4, 2, dropout=0.2), nn.Sequential(nn.Dropout(0.3)))

    @staticmethod
    def rates(model: nn.Module) -> list[float]:
        return [rate.value for rate in report_dropout(model).rates]

    @pytest.mark.parametrize("pattern", ["1.dropout", "*.dropout", "**.dropout", re.compile(r".*dropout")])
    def test_patterns_change_only_matching_rates(self, model: Any, pattern: Any) -> None:
        set_dropout(model, {pattern: 0.5})
        assert self.rates(model) == [0.1, 0.5, 0.3]

    def test_compiled_code_uses_the_new_rate(self) -> None:
        model = nn.Sequential(nn.Dropout(0.5)).train()
        compiled = torch.compile(model, backend="aot_eager")
        x = torch.ones(4096)
        assert 0.4 < (compiled(x) == 0).float().mean() < 0.6
        with set_dropout(model, 0.0):
            assert torch.equal(compiled(x), x)
        assert 0.4 < (compiled(x) == 0).float().mean() < 0.6

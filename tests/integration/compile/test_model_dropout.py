"""`set_dropout` for compiled models."""

from __future__ import annotations

import torch
from torch import nn

from hookdrop.recipes import set_dropout


def test_compiled_code_uses_the_new_rate() -> None:
    model = nn.Sequential(nn.Dropout(0.5)).train()
    compiled = torch.compile(model, backend="aot_eager")
    x = torch.ones(4096)
    assert 0.4 < (compiled(x) == 0).float().mean() < 0.6
    with set_dropout(model, 0.0):
        assert torch.equal(compiled(x), x)
    assert 0.4 < (compiled(x) == 0).float().mean() < 0.6

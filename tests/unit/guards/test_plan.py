"""What a plan warns about, besides shapes."""

from __future__ import annotations

import torch
from torch import nn

from hookdrop import DropPath, LockedDropout, plan
from tests.support.models import Small


def test_drop_path_on_whole_blocks_warns(model: Small, images: torch.Tensor) -> None:
    drafted = plan(model, DropPath(0.1), layers="layer1.*", example_input=images)
    (warning,) = [text for text in drafted.warnings if "whole residual block" in text]
    assert warning.startswith("DropPath at 'layer1.0': the output includes the input")
    assert warning.endswith("such as attn, mlp or bn3. (and 1 more site like it)")


def test_locked_dropout_along_another_axis_than_time_warns() -> None:
    model = nn.ModuleDict({"rnn": nn.LSTM(4, 4, batch_first=True)})
    (warning,) = plan(model, LockedDropout(0.1, time_dim=0), layers="rnn").warnings
    assert warning == (
        "LockedDropout at 'rnn': an LSTM with batch_first=True expects (N, T, C), where time_dim=0 is not T.\n"
        "  write time_dim=1"
    )
    assert plan(model, LockedDropout(0.1, time_dim=1), layers="rnn").warnings == []

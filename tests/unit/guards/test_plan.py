"""What a plan warns about, besides shapes."""

from __future__ import annotations

import torch

from hookdrop import DropPath, plan
from tests.support.models import Small


def test_drop_path_on_whole_blocks_warns(model: Small, images: torch.Tensor) -> None:
    drafted = plan(model, DropPath(0.1), layers="layer1.*", example_input=images)
    (warning,) = [text for text in drafted.warnings if "whole residual block" in text]
    assert warning.startswith("DropPath at 'layer1.0': the output includes the input")
    assert warning.endswith("such as attn, mlp or bn3. (and 1 more site like it)")

"""The regularizers as layers: what they drop, what they keep, what they refuse."""

from __future__ import annotations

import torch

from hookdrop import (
    DropPath,
)


def test_drop_path_agrees_with_timms_under_one_seed() -> None:
    from timm.layers import DropPath as Timm

    x = torch.randn(64, 3, 4)
    torch.manual_seed(1)
    theirs = Timm(0.3)(x)
    torch.manual_seed(1)
    torch.testing.assert_close(DropPath(0.3)(x), theirs)

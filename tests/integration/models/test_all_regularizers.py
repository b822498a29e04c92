"""Regularizers match those of timm under the same seed."""

from __future__ import annotations

import torch

from hookdrop import DropPath


def test_drop_path_matches_timm_under_the_same_seed() -> None:
    from timm.layers import DropPath as Timm

    x = torch.randn(64, 3, 4)
    torch.manual_seed(1)
    theirs = Timm(0.3)(x)
    torch.manual_seed(1)
    torch.testing.assert_close(DropPath(0.3)(x), theirs)

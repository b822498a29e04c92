"""p means p: DropBlock drops what it is asked for, on every map."""

from __future__ import annotations

import math

import torch

from hookdrop.functional import drop_block


def test_torchvisions_drop_block_agrees_in_distribution_with_the_papers_gamma() -> None:
    """The same marginals by position as torchvision's, where it can be asked: odd block, per channel."""
    import torchvision

    x = torch.ones(100, 100, 9, 9)
    ours = (drop_block(x, 0.3, 3, gamma="paper", normalize=None) == 0).double().mean((0, 1))
    theirs = (torchvision.ops.drop_block2d(x, 0.3, 3) == 0).double().mean((0, 1))
    error = math.sqrt(2 * 0.25 / 10_000)
    assert (ours - theirs).abs().max() < 5 * error

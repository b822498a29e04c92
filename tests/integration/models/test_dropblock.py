"""DropBlock drops with the same distribution as torchvision's."""

from __future__ import annotations

import math

import torch

from hookdrop.functional import drop_block


def test_paper_gamma_matches_the_distribution_of_torchvision() -> None:
    """The drop rates by position agree where torchvision supports the setting: odd block sizes, per channel."""
    import torchvision

    x = torch.ones(100, 100, 9, 9)
    ours = (drop_block(x, 0.3, 3, gamma="paper", normalize=None) == 0).double().mean((0, 1))
    theirs = (torchvision.ops.drop_block2d(x, 0.3, 3) == 0).double().mean((0, 1))
    error = math.sqrt(2 * 0.25 / 10_000)
    assert (ours - theirs).abs().max() < 5 * error

"""Regularizers match the functions of torchvision mask for mask under the same seed."""

from __future__ import annotations

import pytest
import torch

from hookdrop import DropPath


@pytest.mark.parametrize("mode", ["row", "batch"])
@pytest.mark.parametrize("p", [0.1, 0.25, 0.5, 0.9])
def test_drop_path_matches_torchvision_under_the_same_seed(p: float, mode: str) -> None:
    stochastic_depth = pytest.importorskip("torchvision").ops.stochastic_depth
    x = torch.randn(256, 3, 4, 4) + 4.0
    torch.manual_seed(3)
    expected = stochastic_depth(x, p, mode)
    torch.manual_seed(3)
    out = DropPath(p, mode).train()(x)
    assert torch.equal(out == 0, expected == 0)
    torch.testing.assert_close(out, expected, rtol=2.0**-22, atol=0.0)

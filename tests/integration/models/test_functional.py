"""Under one seed: PyTorch's and torchvision's own functions, mask for mask."""

from __future__ import annotations

import pytest
import torch

from hookdrop import (
    DropPath,
)


@pytest.mark.parametrize("mode", ["row", "batch"])
@pytest.mark.parametrize("p", [0.1, 0.25, 0.5, 0.9])
def test_drop_path_of_torchvision(p: float, mode: str) -> None:
    stochastic_depth = pytest.importorskip("torchvision").ops.stochastic_depth
    x = torch.randn(256, 3, 4, 4) + 4.0
    torch.manual_seed(3)
    wanted = stochastic_depth(x, p, mode)
    torch.manual_seed(3)
    got = DropPath(p, mode).train()(x)
    assert torch.equal(got == 0, wanted == 0)
    torch.testing.assert_close(got, wanted, rtol=2.0**-22, atol=0.0)

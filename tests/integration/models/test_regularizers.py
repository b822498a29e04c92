"""Regularizers of PyTorch, torchvision and timm: as references for hookdrop's, and in a hooked model."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from hookdrop import DropPath, LinearSchedule, TokenDropout, inject
from hookdrop.functional import drop_block
from tests.support.models import Small


@pytest.mark.parametrize("scale", [True, False])
def test_drop_path_matches_timm_under_the_same_seed(scale: bool) -> None:
    from timm.layers import DropPath as Timm

    x = torch.randn(64, 3, 4)
    torch.manual_seed(1)
    theirs = Timm(0.3, scale_by_keep=scale)(x)
    torch.manual_seed(1)
    torch.testing.assert_close(DropPath(0.3, scale=scale)(x), theirs)


@pytest.mark.parametrize(("p", "mode"), [(0.1, "row"), (0.25, "row"), (0.9, "row"), (0.5, "batch")])
def test_drop_path_matches_torchvision_under_the_same_seed(p: float, mode: str) -> None:
    stochastic_depth = pytest.importorskip("torchvision").ops.stochastic_depth
    x = torch.randn(256, 3, 4, 4) + 4.0
    torch.manual_seed(3)
    expected = stochastic_depth(x, p, mode)
    torch.manual_seed(3)
    out = DropPath(p, mode).train()(x)
    assert torch.equal(out == 0, expected == 0)
    torch.testing.assert_close(out, expected, rtol=2.0**-22, atol=0.0)


def test_paper_gamma_matches_the_distribution_of_torchvision() -> None:
    """The drop rates by position agree where torchvision supports the setting: odd block sizes, per channel."""
    import torchvision

    x = torch.ones(100, 100, 9, 9)
    ours = (drop_block(x, 0.3, 3, gamma="paper", normalize=None) == 0).double().mean((0, 1))
    theirs = (torchvision.ops.drop_block2d(x, 0.3, 3) == 0).double().mean((0, 1))
    error = math.sqrt(2 * 0.25 / 10_000)
    assert (ours - theirs).abs().max() < 5 * error


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Dropout(0.4, inplace=True),
        lambda: __import__("torchvision").ops.StochasticDepth(0.4, "row"),
        lambda: __import__("torchvision").ops.DropBlock2d(0.4, 3),
        lambda: __import__("timm").layers.DropPath(0.4),
    ],
)
def test_schedule_controls_the_rate_of_foreign_modules(make: object, model: Small, images: torch.Tensor) -> None:
    theirs = make()
    drop = inject(model, theirs, layers="layer1.*.bn1", schedule=LinearSchedule(4))
    assert drop.sites[0].p == 0
    drop.step(4)
    with drop.recording(last=0) as m:
        for _ in range(40):
            model(images)
    assert drop.p == 0.4
    assert m.totals.dropped == pytest.approx(0.4, abs=0.08)
    assert "0.4" in repr(theirs), "the module that was passed in was changed"


@pytest.mark.parametrize(("p", "prefix"), [(0.5, 1), (0.3, 0), (0.75, 4), (0.999, 1)])
def test_removed_tokens_are_those_of_timm_patch_dropout(p: float, prefix: int) -> None:
    """Bit for bit with the same seed, and with the same gradients."""
    from timm.layers import PatchDropout

    x = torch.randn(6, 30 + prefix, 8, requires_grad=True)
    results = []
    for drop in (TokenDropout(p, prefix, remove=True), PatchDropout(p, num_prefix_tokens=prefix)):
        torch.manual_seed(0)
        y = drop.train()(x)
        results.append((y, torch.autograd.grad(y.square().sum(), x)[0]))
    assert all(map(torch.equal, *results))

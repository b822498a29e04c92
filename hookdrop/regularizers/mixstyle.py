"""MixStyle: mixing the feature statistics of samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from hookdrop.errors import ShapeError
from hookdrop.kernels.random_numbers import most_precise_dtype, rand
from hookdrop.regularizers.base import Rate, Regularizer, describe_map, nhwc_warnings
from hookdrop.regularizers.cutout import check_map
from hookdrop.utils.validation import floating, positive

BATCH_P = Rate("p", kind="noise")
"""The probability that a batch is changed."""

EPSILON = 1e-6
"""The papers' code adds this to a variance."""


def mix_style(x: Tensor, p: float | Tensor = 0.5, alpha: float = 0.1, training: bool = True) -> Tensor:
    """With probability `p`, mix the style of each sample of (N, C, H, W) with another's: see `MixStyle`."""
    return _mix_style(x, BATCH_P.argument(p, "mix_style"), positive(alpha, "alpha", "mix_style"), training)


def _mix_style(x: Tensor, p: float | Tensor, alpha: float, training: bool = True) -> Tensor:
    floating(x, "mix_style")
    check_style(x.shape, "mix_style", "mixes")
    if not training or x.numel() == 0 or (not isinstance(p, Tensor) and p == 0.0):
        return x
    n = x.shape[0]
    mixed = rand((), torch.float32, x.device) < p
    own_N111 = symmetric_beta(alpha, (n, 1, 1, 1), x.device)
    # Not `randperm`: a compiler pattern of PyTorch 2.13 for it fails here.
    partner_N = rand((n,), torch.float32, x.device).argsort()
    mean, std = style(x.detach())
    own = own_N111.to(mean.dtype)
    new_mean, new_std = (own * value + (1.0 - own) * value[partner_N] for value in (mean, std))
    return restyle(x, mixed, mean, std, new_mean, new_std)


def symmetric_beta(alpha: float, shape: Sequence[int], device: torch.device) -> Tensor:
    """Sample Beta(alpha, alpha), each number from two uniform ones, via Student's t.

    A ratio of gamma variates would be 0 / 0 for small alpha.

    Reference: Devroye 1996, "Random variate generation in one line of code", section 4.
    """
    dtype = most_precise_dtype(device)
    u = 1.0 - rand(shape, dtype, device)
    cosine = torch.cos(2.0 * math.pi * rand(shape, dtype, device))
    odds = torch.expm1(-u.log() / alpha) * cosine.square()
    return 0.5 + 0.5 * cosine.sign() * (1.0 + 1.0 / odds).rsqrt()


def check_style(shape: Sequence[int], owner: str, does: str) -> None:
    """Raise `ShapeError` unless `shape` is (N, C, H, W) with more than one pixel."""
    check_map(shape, owner, f"{does} the styles of feature maps")
    if shape[2] * shape[3] == 1:
        raise ShapeError(f"got {tuple(shape)}: a 1x1 map has no standard deviation.\n  hook a layer with a larger map.")


def style(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel, (N, C, 1, 1), at least in float32."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x.mean((2, 3), keepdim=True), (x.var((2, 3), keepdim=True) + EPSILON).sqrt()


def restyle(x: Tensor, changed: Tensor, mean: Tensor, std: Tensor, new_mean: Tensor, new_std: Tensor) -> Tensor:
    """Replace the style `mean`, `std` of `x` by the new one, where `changed`, a 0-d bool tensor."""
    # If not changed, (x - 0) * 1 + 0 equals `x` bit for bit, without a synchronization on the value of `changed`.
    before = torch.where(changed, mean, 0.0)
    factor = torch.where(changed, new_std / std, 1.0)
    after = torch.where(changed, new_mean, 0.0)
    return ((x - before) * factor + after).to(x.dtype)


class MixStyle(Regularizer):
    """With probability `p`, mix each sample's style (channel mean and standard deviation) with another sample's.

    Hook the first blocks of a network, whose statistics carry style (`layer1` and `layer2` of a ResNet).

    Args:
        p: probability of mixing a batch, in [0, 1]. One draw decides for all its samples.
        alpha: > 0. The weight of a sample's own style is lambda ~ Beta(alpha, alpha), drawn for each sample.

    Shape: (N, C, H, W), N > 1. The gradient treats the statistics over H and W as constants. With
    DistributedDataParallel, styles are mixed within each rank.

    Raises:
        ShapeError: in forward, if the input is not (N, C, H, W) with more than one pixel.

    Reference: Zhou et al. 2021, "Domain generalization with MixStyle", arXiv:2104.02008 (the version with random
    shuffling).
    """

    rate: ClassVar[Rate] = BATCH_P

    def __init__(self, p: float = 0.5, alpha: float = 0.1) -> None:
        super().__init__()
        self.p = self.rate.valid(p, self.title)
        self.alpha = positive(alpha, "alpha", self.title)

    def check(self, shape: Sequence[int]) -> None:
        check_style(shape, self.title, "mixes")

    def reading(self, shape: Sequence[int]) -> str:
        return f"N={shape[0]} {describe_map(shape, 1)}"

    def shape_warnings(self, shape: Sequence[int]) -> list[str]:
        found = nhwc_warnings(shape, 1, "it would mix the statistics of rows; hook a layer that returns NCHW.")
        if shape[0] == 1:
            found.append("a batch of one sample has no other style to mix in, so MixStyle does nothing.")
        return found

    def regularize(self, x: Tensor, rate: Any) -> Tensor:
        return _mix_style(x, rate, self.alpha)

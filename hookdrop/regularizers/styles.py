"""MixStyle and DSU: changing the style of samples, the mean and standard deviation of each channel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from hookdrop.core.arguments import positive
from hookdrop.core.errors import ShapeError
from hookdrop.core.regularizer import Rate, Regularizer
from hookdrop.kernels.random_numbers import most_precise_dtype, rand, randn_like

_P = Rate("p", kind="noise")
_EPSILON = 1e-6  # the papers' code adds it to a variance


def mix_style(x: Tensor, p: float | Tensor = 0.5, alpha: float = 0.1, training: bool = True) -> Tensor:
    """With probability `p`, mix the style of each sample of (N, C, H, W) with another's: see `MixStyle`."""
    p, alpha = _P.argument(p, x, "mix_style", MixStyle.axes), positive(alpha, "alpha", "mix_style")
    _check_pixels(x.shape)
    if not training or x.numel() == 0 or (not isinstance(p, Tensor) and p == 0.0):
        return x
    n = x.shape[0]
    mixed = rand((), torch.float32, x.device) < p
    own_N111 = symmetric_beta(alpha, (n, 1, 1, 1), x.device)
    # Not `randperm`: a compiler pattern of PyTorch 2.13 for it fails here.
    partner_N = rand((n,), torch.float32, x.device).argsort()
    mean, std = _style(x.detach())
    own = own_N111.to(mean.dtype)
    new_mean, new_std = (own * value + (1.0 - own) * value[partner_N] for value in (mean, std))
    return _restyle(x, mixed, mean, std, new_mean, new_std)


def dsu(x: Tensor, p: float | Tensor = 0.5, training: bool = True) -> Tensor:
    """With probability `p`, add noise to the style of each sample of (N, C, H, W): see `DSU`."""
    p = _P.argument(p, x, "dsu", DSU.axes)
    _check_pixels(x.shape)
    # One sample has no spread.
    if not training or x.numel() == 0 or x.shape[0] == 1 or (not isinstance(p, Tensor) and p == 0.0):
        return x
    changed = rand((), torch.float32, x.device) < p
    mean, std = _style(x)
    new_mean, new_std = (
        value + randn_like(value) * (value.var(0, keepdim=True) + _EPSILON).sqrt() for value in (mean, std)
    )
    return _restyle(x, changed, mean, std, new_mean, new_std)


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


def _check_pixels(shape: Sequence[int]) -> None:
    if shape[2] * shape[3] == 1:
        raise ShapeError(f"got {tuple(shape)}: a 1x1 map has no standard deviation.\n  hook a layer with a larger map.")


def _style(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel, (N, C, 1, 1), at least in float32."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x.mean((2, 3), keepdim=True), (x.var((2, 3), keepdim=True) + _EPSILON).sqrt()


def _restyle(x: Tensor, changed: Tensor, mean: Tensor, std: Tensor, new_mean: Tensor, new_std: Tensor) -> Tensor:
    """Replace the style `mean`, `std` of `x` by the new one, where `changed`, a 0-d bool tensor."""
    # If not changed, (x - 0) * 1 + 0 equals `x` bit for bit, without a synchronization on the value of `changed`.
    before = torch.where(changed, mean, 0.0)
    factor = torch.where(changed, new_std / std, 1.0)
    after = torch.where(changed, new_mean, 0.0)
    return ((x - before) * factor + after).to(x.dtype)


class _StyleRegularizer(Regularizer):
    rate: ClassVar[Rate] = _P
    mixes_samples = True
    axes = "N C H W"

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = self.rate.valid(p, self.title)

    def check(self, shape: Sequence[int]) -> None:
        super().check(shape)
        _check_pixels(shape)

    def shape_warnings(self, shape: Sequence[int]) -> list[str]:
        alone = f"a batch of one sample has a single style, so {self.title} does nothing."
        return [*super().shape_warnings(shape), *([alone] if shape[0] == 1 else [])]


class MixStyle(_StyleRegularizer):
    """With probability `p`, mix each sample's style (channel mean and standard deviation) with another sample's.

    Hook the first blocks of a network, whose statistics carry style (`layer1` and `layer2` of a ResNet).

    Args:
        p: probability of mixing a batch, in [0, 1]. One draw decides for all its samples.
        alpha: > 0. The weight of a sample's own style is lambda ~ Beta(alpha, alpha), drawn for each sample.

    Shape: (N, C, H, W), N > 1, more than one pixel. The gradient treats the statistics over H and W as constants. With
    DistributedDataParallel, styles are mixed within each rank.

    Reference: Zhou et al. 2021, "Domain generalization with MixStyle", arXiv:2104.02008 (the version with random
    shuffling).
    """

    def __init__(self, p: float = 0.5, alpha: float = 0.1) -> None:
        super().__init__(p)
        self.alpha = positive(alpha, "alpha", self.title)

    def regularize(self, x: Tensor, rate: Any) -> Tensor:
        return mix_style(x, rate, self.alpha)


class DSU(_StyleRegularizer):
    """With probability `p`, add Gaussian noise to each sample's style (channel mean and standard deviation).

    The standard deviation of the noise is that of the statistic over the batch, for each channel. A batch of similar
    samples is therefore changed less than one of different domains.

    Hook the first convolution, the pooling after it, and the ends of all stages, as the authors do.

    Args:
        p: probability of perturbing a batch, in [0, 1]. One draw decides for all its samples.

    Shape: (N, C, H, W), N > 1, more than one pixel. One sample is returned unchanged. The gradient also flows through
    the statistics, unlike `MixStyle`. With DistributedDataParallel, the spread is that of each rank.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> x = torch.randn(4, 1, 32, 32) * torch.tensor([1.0, 2.0, 3.0, 4.0]).view(4, 1, 1, 1)
        >>> DSU(p=1.0)(x).std((1, 2, 3)).round(decimals=1)
        tensor([0.4000, 2.0000, 3.3000, 1.2000])

    Reference: Li et al. 2022, "Uncertainty modeling for out-of-distribution generalization", arXiv:2202.03958.
    """

    regularize = staticmethod(dsu)

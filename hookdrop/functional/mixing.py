"""MixStyle: the statistics of one sample given to another."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hookdrop.errors import ShapeError
from hookdrop.functional.rates import checked_rate
from hookdrop.functional.square import check_map
from hookdrop.kernels.bernoulli import finest
from hookdrop.utils.validation import floating, number

_EPSILON = 1e-6
"""What the paper's code adds to a variance."""


def mix_style(x: Tensor, p: float | Tensor = 0.5, alpha: float = 0.1, training: bool = True) -> Tensor:
    """With probability `p`, give each sample a mean and standard deviation mixed with those of another sample.

    For each channel they are taken over the map and regarded as constants; a sample's own have the weight
    lambda ~ Beta(alpha, alpha), those of its partner in a random permutation 1 - lambda.

    Args:
        x: (N, C, H, W), floating point.
        p: the probability that the batch is mixed, in [0, 1].
        alpha: above 0; the smaller, the nearer to one sample's style or the other's.
        training: False returns `x` itself.

    Raises:
        ShapeError: not (N, C, H, W), or maps of one pixel.

    Reference: Zhou et al. 2021, "Domain generalization with MixStyle", arXiv:2104.02008.
    """
    floating(x, "mix_style")
    p = checked_rate(p, owner="mix_style")
    alpha = valid_alpha(alpha, "mix_style")
    check_style(x.shape, "mix_style")
    if not training or x.numel() == 0 or (not isinstance(p, Tensor) and p == 0.0):
        return x
    n = x.shape[0]
    mixed = torch.rand((), dtype=torch.float32, device=x.device) < p
    own_N111 = symmetric_beta(alpha, (n, 1, 1, 1), x.device)
    # Not `randperm`, which the compiler of PyTorch 2.13 has a pattern for that fails here.
    partner_N = torch.rand(n, dtype=torch.float32, device=x.device).argsort()
    mean, std = _style(x)
    own = own_N111.to(mean.dtype)
    # What is not mixed is x - 0 times 1 plus 0: `x` to the last bit, though nobody waits for `mixed`.
    before = torch.where(mixed, mean, 0.0)
    factor = torch.where(mixed, (own * std + (1.0 - own) * std[partner_N]) / std, 1.0)
    after = torch.where(mixed, own * mean + (1.0 - own) * mean[partner_N], 0.0)
    return ((x - before) * factor + after).to(x.dtype)


def symmetric_beta(alpha: float, shape: Sequence[int], device: torch.device) -> Tensor:
    """Numbers from Beta(alpha, alpha), made of two uniform ones each, as Student's t is.

    Gamma variates, whose ratio it is too, are 0 where alpha is small, and no number is left of 0 / 0.

    Reference: Devroye 1996, "Random variate generation in one line of code", section 4.
    """
    dtype = finest(device)
    u = 1.0 - torch.rand(tuple(shape), dtype=dtype, device=device)
    cosine = torch.cos(2.0 * math.pi * torch.rand(tuple(shape), dtype=dtype, device=device))
    odds = torch.expm1(-u.log() / alpha) * cosine.square()
    return 0.5 + 0.5 * cosine.sign() * (1.0 + 1.0 / odds).rsqrt()


def valid_alpha(alpha: object, owner: str) -> float:
    """`alpha` as a float above 0."""
    value = number(alpha, "alpha", owner)
    if value <= 0.0:
        raise ValueError(f"{owner}: alpha must be above 0, got {value:g}.")
    return value


def check_style(shape: Sequence[int], owner: str) -> None:
    """Raise `ShapeError` unless `shape` is (N, C, H, W) with more than one pixel."""
    check_map(shape, owner, "mixes the styles of maps")
    if shape[2] * shape[3] == 1:
        raise ShapeError(
            f"got {tuple(shape)}: one pixel has no standard deviation to be mixed.\n  hook a layer with a larger map."
        )


def _style(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel, (N, C, 1, 1), as constants."""
    x = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    return x.mean((2, 3), keepdim=True), (x.var((2, 3), keepdim=True) + _EPSILON).sqrt()

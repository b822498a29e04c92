"""Noise, multiplied in or added."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hookdrop import in_graph
from hookdrop.functional.rates import checked_rate
from hookdrop.utils.validation import floating


def gaussian_dropout(x: Tensor, p: float | Tensor, training: bool = True) -> Tensor:
    """Multiply by 1 + e, e ~ N(0, p / (1 - p)): the mean and variance of dropout, with nothing zeroed.

    Args:
        x: any shape, floating point.
        p: in [0, 1).
        training: False returns `x` itself.

    Reference: Srivastava et al. 2014, section 10.
    """
    floating(x, "gaussian_dropout", nested=True)
    p = checked_rate(p, owner="gaussian_dropout", open_end=True)
    if isinstance(p, Tensor):
        return in_graph.gaussian_dropout(x, p) if training else x
    if not training or p == 0.0:
        return x
    return x * torch.randn_like(x).mul_(math.sqrt(p / (1.0 - p))).add_(1.0)


def gaussian_noise(x: Tensor, std: float | Tensor, training: bool = True) -> Tensor:
    """Add N(0, std^2), `std` in the units of `x`. Reference: Bishop 1995, "Training with noise ..."."""
    floating(x, "gaussian_noise", nested=True)
    std = checked_rate(std, "std", "gaussian_noise", math.inf)
    if isinstance(std, Tensor):
        return in_graph.gaussian_noise(x, std) if training else x
    return x + torch.randn_like(x).mul_(std) if training and std > 0.0 else x


def uniform_noise(x: Tensor, beta: float | Tensor = 0.1, training: bool = True) -> Tensor:
    """Multiply by 1 + r, r ~ U[-beta, beta] for each element: the mean is kept, the variance all but kept.

    Args:
        x: any shape, floating point.
        beta: in [0, 1].
        training: False returns `x` itself.

    Reference: Li et al. 2019, arXiv:1801.05134, section 5 (Uout).
    """
    floating(x, "uniform_noise")
    beta = checked_rate(beta, "beta", "uniform_noise")
    if not training or (not isinstance(beta, Tensor) and beta == 0.0):
        return x
    # In low precision the random numbers would be few, and their mean not 1/2: only the product is rounded.
    r = torch.rand_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
    return (x * (1.0 + (2.0 * r - 1.0) * beta)).to(x.dtype)

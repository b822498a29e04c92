"""Multiplicative and additive noise."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from hookdrop.kernels.random_numbers import rand_like, randn_like
from hookdrop.regularizers.base import STD, Rate, Regularizer
from hookdrop.utils.validation import as_rate_tensor, drop_rate, floating

_DROPOUT_P = Rate("p", kind="noise", open_end=True)
_BETA = Rate("beta", kind="noise")


def gaussian_dropout(x: Tensor, p: float | Tensor, training: bool = True) -> Tensor:
    """Multiply by 1 + e, e ~ N(0, p / (1 - p)), `p` in [0, 1): see `GaussianDropout`."""
    return _gaussian_dropout(x, _DROPOUT_P.argument(p, "gaussian_dropout"), training)


def gaussian_noise(x: Tensor, std: float | Tensor, training: bool = True) -> Tensor:
    """Add N(0, std^2), `std` in the units of `x`: see `GaussianNoise`."""
    return _gaussian_noise(x, STD.argument(std, "gaussian_noise"), training)


def uniform_noise(x: Tensor, beta: float | Tensor = 0.1, training: bool = True) -> Tensor:
    """Multiply by 1 + r, r ~ U[-beta, beta] for each element: see `UniformNoise`."""
    return _uniform_noise(x, _BETA.argument(beta, "uniform_noise"), training)


def _gaussian_dropout(x: Tensor, p: float | Tensor, training: bool = True) -> Tensor:
    floating(x, "gaussian_dropout", nested=True)
    if not training:
        return x
    if isinstance(p, Tensor):
        return x * (1.0 + randn_like(x) * (p / (1.0 - p)).sqrt())
    return x * torch.randn_like(x).mul_(math.sqrt(p / (1.0 - p))).add_(1.0) if p > 0.0 else x


def _gaussian_noise(x: Tensor, std: float | Tensor, training: bool = True) -> Tensor:
    floating(x, "gaussian_noise", nested=True)
    if not training:
        return x
    if isinstance(std, Tensor):
        return x + randn_like(x) * std
    return torch.add(x, torch.randn_like(x), alpha=std) if std > 0.0 else x


def _uniform_noise(x: Tensor, beta: float | Tensor, training: bool = True) -> Tensor:
    floating(x, "uniform_noise")
    if not training or (not isinstance(beta, Tensor) and beta == 0.0):
        return x
    # In low precision the few possible random numbers do not average 1/2, so round the product only.
    r = rand_like(x, torch.promote_types(x.dtype, torch.float32))
    if isinstance(beta, Tensor):
        return (x * (1.0 + (2.0 * r - 1.0) * beta)).to(x.dtype)
    return (x * torch.add(as_rate_tensor(1.0 - beta), r, alpha=2.0 * beta)).to(x.dtype)


class GaussianDropout(Regularizer):
    """Multiply by 1 + e, e ~ N(0, p / (1 - p)): the mean and variance of dropout, without zeros.

    Args:
        p: the drop probability of the equivalent dropout, in [0, 1).
        keep_prob: 1 - p, instead of `p`.

    Shape: any.

    Reference: Srivastava et al. 2014, "Dropout: A simple way ...", section 10.
    """

    rate: ClassVar[Rate] = _DROPOUT_P
    independent_samples = True

    def __init__(self, p: float | None = None, *, keep_prob: float | None = None) -> None:
        super().__init__()
        self.p = self.rate.valid(drop_rate(p, keep_prob, self.title), self.title)

    def regularize(self, x: Tensor, rate: Any) -> Tensor:
        return _gaussian_dropout(x, rate)


class GaussianNoise(Regularizer):
    """Add N(0, std^2). A schedule drives `std`.

    Args:
        std: standard deviation in the units of the activations, at least 0.

    Shape: any.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> GaussianNoise(std=0.5)(torch.zeros(10_000)).std().round(decimals=1)
        tensor(0.5000)

    Reference: Bishop 1995, "Training with noise is equivalent to Tikhonov regularization".
    """

    rate: ClassVar[Rate] = STD
    independent_samples = True

    def __init__(self, std: float = 0.1) -> None:
        super().__init__()
        self.std = self.rate.valid(std, self.title)

    def regularize(self, x: Tensor, rate: Any) -> Tensor:
        return _gaussian_noise(x, rate)


class UniformNoise(Regularizer):
    """Multiply by 1 + r, r ~ U[-beta, beta] for each element: Uout. A schedule drives `beta`.

    Intended for networks with batch norm: it keeps the mean and adds only beta^2 / 3 of the mean square to the
    variance, where dropout adds p / (1 - p) of it.

    Args:
        beta: the largest relative change of an element, in [0, 1].

    Shape: any.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> y = UniformNoise(beta=0.5)(torch.ones(10_000))
        >>> y.amin().round(decimals=2), y.amax().round(decimals=2)
        (tensor(0.5000), tensor(1.5000))

    Reference: Li et al. 2019, "Understanding the disharmony between dropout and batch normalization by variance
    shift", arXiv:1801.05134, section 5.
    """

    rate: ClassVar[Rate] = _BETA
    independent_samples = True

    def __init__(self, beta: float = 0.1) -> None:
        super().__init__()
        self.beta = self.rate.valid(beta, self.title)

    def regularize(self, x: Tensor, rate: Any) -> Tensor:
        return _uniform_noise(x, rate)

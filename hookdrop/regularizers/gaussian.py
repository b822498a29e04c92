"""Gaussian noise, multiplied in or added."""

from __future__ import annotations

import math
from typing import ClassVar

from torch import Tensor

from hookdrop import functional
from hookdrop.arguments import drop_rate
from hookdrop.regularizers.base import Regularizer


class GaussianDropout(Regularizer):
    """Multiply by 1 + e, e ~ N(0, p / (1 - p)): dropout's mean and variance, with nothing zeroed.

    Args:
        p: the drop probability of the dropout that it matches, in [0, 1).
        keep_prob: 1 - p, instead of `p`.

    Shape: any.

    Reference: Srivastava et al. 2014, "Dropout: A simple way ...", section 10.
    """

    open_end: ClassVar[bool] = True
    drops: ClassVar[bool] = False

    def __init__(self, p: float | None = None, *, keep_prob: float | None = None) -> None:
        super().__init__()
        self.p = self.valid_rate(drop_rate(p, keep_prob, self.title))

    def regularize_at(self, x: Tensor, rate: float | Tensor) -> Tensor:
        return functional.gaussian_dropout(x, rate)


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

    rate_name: ClassVar[str | None] = "std"
    max_rate: ClassVar[float] = math.inf
    probability: ClassVar[bool] = False
    drops: ClassVar[bool] = False

    def __init__(self, std: float = 0.1) -> None:
        super().__init__()
        self.std = self.valid_rate(std)

    def regularize_at(self, x: Tensor, rate: float | Tensor) -> Tensor:
        return functional.gaussian_noise(x, rate)

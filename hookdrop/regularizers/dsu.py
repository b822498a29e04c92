"""DSU: perturbing feature statistics by their spread over the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from hookdrop.kernels.random_numbers import rand, randn_like
from hookdrop.regularizers.base import Rate, Regularizer, describe_map, nhwc_warnings
from hookdrop.regularizers.mixstyle import BATCH_P, EPSILON, check_style, restyle, style
from hookdrop.utils.validation import floating


def dsu(x: Tensor, p: float | Tensor = 0.5, training: bool = True) -> Tensor:
    """With probability `p`, add noise to the style of each sample of (N, C, H, W): see `DSU`."""
    return _dsu(x, BATCH_P.argument(p, "dsu"), training)


def _dsu(x: Tensor, p: float | Tensor, training: bool = True) -> Tensor:
    floating(x, "dsu")
    check_style(x.shape, "dsu", "perturbs")
    # One sample has no spread.
    if not training or x.numel() == 0 or x.shape[0] == 1 or (not isinstance(p, Tensor) and p == 0.0):
        return x
    changed = rand((), torch.float32, x.device) < p
    mean, std = style(x)
    new_mean, new_std = _perturbed(mean), _perturbed(std)
    return restyle(x, changed, mean, std, new_mean, new_std)


def _perturbed(statistic_NC11: Tensor) -> Tensor:
    spread_1C11 = (statistic_NC11.var(0, keepdim=True) + EPSILON).sqrt()
    return statistic_NC11 + randn_like(statistic_NC11) * spread_1C11


class DSU(Regularizer):
    """With probability `p`, add Gaussian noise to each sample's style (channel mean and standard deviation).

    The standard deviation of the noise is that of the statistic over the batch, for each channel. A batch of similar
    samples is therefore changed less than one of different domains.

    Hook the first convolution, the pooling after it, and the ends of all stages, as the authors do.

    Args:
        p: probability of perturbing a batch, in [0, 1]. One draw decides for all its samples.

    Shape: (N, C, H, W), N > 1. One sample is returned unchanged. The gradient also flows through the statistics, unlike
    `MixStyle`. With DistributedDataParallel, the spread is that of each rank.

    Raises:
        ShapeError: in forward, if the input is not (N, C, H, W) with more than one pixel.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> x = torch.randn(4, 1, 32, 32) * torch.tensor([1.0, 2.0, 3.0, 4.0]).view(4, 1, 1, 1)
        >>> DSU(p=1.0)(x).std((1, 2, 3)).round(decimals=1)
        tensor([0.4000, 2.0000, 3.3000, 1.2000])

    Reference: Li et al. 2022, "Uncertainty modeling for out-of-distribution generalization", arXiv:2202.03958.
    """

    rate: ClassVar[Rate] = BATCH_P

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = self.rate.valid(p, self.title)

    def check(self, shape: Sequence[int]) -> None:
        check_style(shape, self.title, "perturbs")

    def reading(self, shape: Sequence[int]) -> str:
        return f"N={shape[0]} {describe_map(shape, 1)}"

    def shape_warnings(self, shape: Sequence[int]) -> list[str]:
        found = nhwc_warnings(shape, 1, "it would perturb the statistics of rows; hook a layer that returns NCHW.")
        if shape[0] == 1:
            found.append("a batch of one sample has no spread of styles, so DSU does nothing.")
        return found

    def regularize(self, x: Tensor, rate: Any) -> Tensor:
        return _dsu(x, rate)

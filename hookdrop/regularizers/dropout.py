"""Dropout of elements and of channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from hookdrop import functional
from hookdrop.functional.channels import check_channels
from hookdrop.regularizers.base import Regularizer, map_reading, nhwc_doubt
from hookdrop.utils.validation import drop_rate


class Dropout(Regularizer):
    """Zero each element with probability `p`, scale the rest by 1 / (1 - p).

    Args:
        p: probability to drop, in [0, 1].
        keep_prob: 1 - p, instead of `p`.

    Shape: any.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> Dropout(p=0.5)(torch.ones(6))
        tensor([0., 0., 2., 0., 0., 0.])

    Reference: Srivastava et al. 2014, "Dropout: A simple way to prevent neural networks from overfitting".
    """

    def __init__(self, p: float | None = None, *, keep_prob: float | None = None) -> None:
        super().__init__()
        self.p = drop_rate(p, keep_prob, self.title)

    def regularize_at(self, x: Tensor, rate: float | Tensor) -> Tensor:
        return functional.dropout(x, rate)


class _ChannelDropout(Dropout):
    rank: ClassVar[int]

    def check(self, shape: Sequence[int]) -> None:
        check_channels(tuple(shape), self.title, self.rank)

    def reading(self, shape: Sequence[int]) -> str:
        return map_reading(shape, 1)

    def doubts(self, shape: Sequence[int]) -> list[str]:
        return nhwc_doubt(shape, 1, "it would drop rows of the map, not channels; hook a layer that gives NCHW.")


class Dropout1d(_ChannelDropout):
    """Zero whole channels with probability `p`, scale the rest by 1 / (1 - p).

    Args:
        p: probability to drop, in [0, 1].
        keep_prob: 1 - p, instead of `p`.

    Shape: (N, C, L). Tokens are (N, L, C): this would drop tokens there.

    Reference: Tompson et al. 2015, "Efficient object localization using convolutional networks",
    arXiv:1411.4280 (SpatialDropout).
    """

    rank = 3

    def regularize_at(self, x: Tensor, rate: float | Tensor) -> Tensor:
        return functional.dropout1d(x, rate)


class Dropout2d(_ChannelDropout):
    """`Dropout1d` for (N, C, H, W); maps in NHWC are warned of.

    Reference: Tompson et al. 2015, arXiv:1411.4280 (SpatialDropout).
    """

    rank = 4

    def regularize_at(self, x: Tensor, rate: float | Tensor) -> Tensor:
        return functional.dropout2d(x, rate)


class Dropout3d(_ChannelDropout):
    """`Dropout1d` for (N, C, D, H, W). Reference: Tompson et al. 2015, arXiv:1411.4280 (SpatialDropout)."""

    rank = 5

    def regularize_at(self, x: Tensor, rate: float | Tensor) -> Tensor:
        return functional.dropout3d(x, rate)

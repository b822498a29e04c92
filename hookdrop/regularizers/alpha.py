"""Dropout for self-normalizing networks (SELU)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hookdrop import functional
from hookdrop.functional.channels import check_channels
from hookdrop.regularizers.base import map_reading
from hookdrop.regularizers.dropout import Dropout


class AlphaDropout(Dropout):
    """Set elements to SELU's negative saturation with probability `p`, then restore mean and variance.

    Args:
        p: probability to drop, in [0, 1].
        keep_prob: 1 - p, instead of `p`.

    Shape: any; inputs of mean 0 and variance 1 keep both.

    Reference: Klambauer et al. 2017, "Self-normalizing neural networks", arXiv:1706.02515, section 3.
    """

    def regularize_at(self, x: Tensor, rate: float | Tensor) -> Tensor:
        return functional.alpha_dropout(x, rate)


class FeatureAlphaDropout(Dropout):
    """`AlphaDropout` of whole channels of (N, C, ...)."""

    def check(self, shape: Sequence[int]) -> None:
        check_channels(tuple(shape), self.title)

    def reading(self, shape: Sequence[int]) -> str:
        return map_reading(shape, 1)

    def regularize_at(self, x: Tensor, rate: float | Tensor) -> Tensor:
        return functional.feature_alpha_dropout(x, rate)

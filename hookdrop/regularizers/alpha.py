"""Alpha dropout, for self-normalizing networks (SELU)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hookdrop.kernels.custom_ops import draw_elements
from hookdrop.kernels.masking import slice_mask
from hookdrop.regularizers.base import P, describe_map
from hookdrop.regularizers.dropout import Dropout, check_channels
from hookdrop.utils.validation import floating

_SATURATION = 1.7580993408473766
"""The negative of SELU's limit at minus infinity: scale * alpha."""


def alpha_dropout(x: Tensor, p: float | Tensor, training: bool = True) -> Tensor:
    """Set elements to SELU's negative saturation value, keeping mean and variance: see `AlphaDropout`."""
    return _alpha_dropout(x, P.argument(p, "alpha_dropout"), training)


def feature_alpha_dropout(x: Tensor, p: float | Tensor, training: bool = True) -> Tensor:
    """`alpha_dropout` of whole channels of (N, C, ...): see `FeatureAlphaDropout`."""
    return _feature_alpha_dropout(x, P.argument(p, "feature_alpha_dropout"), training)


def _alpha_dropout(x: Tensor, p: float | Tensor, training: bool = True) -> Tensor:
    floating(x, "alpha_dropout")
    if not training:
        return x
    if isinstance(p, Tensor):
        return _saturate(x, (~draw_elements(x, p)).to(x.dtype), p)
    return F.alpha_dropout(x, p, True) if p > 0.0 else x


def _feature_alpha_dropout(x: Tensor, p: float | Tensor, training: bool = True) -> Tensor:
    floating(x, "feature_alpha_dropout")
    check_channels(x.shape, "feature_alpha_dropout")
    if not training:
        return x
    if isinstance(p, Tensor):
        return _saturate(x, slice_mask(x, p, (*x.shape[:2], *[1] * (x.dim() - 2))), p)
    return F.feature_alpha_dropout(x, p, True) if p > 0.0 else x


def _saturate(x: Tensor, kept: Tensor, p: Tensor) -> Tensor:
    """`AlphaDropout` where `kept` is 0; all zeros if p is 1, as in PyTorch."""
    a = torch.where(p < 1.0, ((_SATURATION**2 * p + 1.0) * (1.0 - p)).rsqrt(), 0.0)
    return (x * kept + (kept - 1.0) * _SATURATION) * a + _SATURATION * a * p


class AlphaDropout(Dropout):
    """Set elements to SELU's negative saturation with probability `p`, then restore mean and variance.

    Args:
        p: probability to drop, in [0, 1].
        keep_prob: 1 - p, instead of `p`.

    Shape: any. Inputs with mean 0 and variance 1 keep both.

    Reference: Klambauer et al. 2017, "Self-normalizing neural networks", arXiv:1706.02515, "New Dropout Technique".
    """

    independent_samples = True

    def regularize(self, x: Tensor, rate: Any) -> Tensor:
        return _alpha_dropout(x, rate)


class FeatureAlphaDropout(Dropout):
    """`AlphaDropout` of whole channels of (N, C, ...)."""

    independent_samples = True

    def check(self, shape: Sequence[int]) -> None:
        check_channels(shape, self.title)

    def reading(self, shape: Sequence[int]) -> str:
        return describe_map(shape, 1)

    def regularize(self, x: Tensor, rate: Any) -> Tensor:
        return _feature_alpha_dropout(x, rate)

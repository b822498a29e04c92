"""Dropout of elements and of channels: to zero, or to SELU's saturation (alpha dropout)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from hookdrop.kernels import custom_ops, drawing
from hookdrop.kernels.masking import HALF, apply_mask, keep_scale, slice_dropout, slice_mask
from hookdrop.regularizers.base import DropRegularizer, P
from hookdrop.utils import torch_internals as internals
from hookdrop.utils.validation import as_rate_tensor, floating

_MIN_NATIVE_ELEMENTS = 2**15  # from here on, hookdrop's implementation is faster than PyTorch's
_SATURATION = 1.7580993408473766  # the negative of SELU's limit at minus infinity: scale * alpha


def dropout(x: Tensor, p: float | Tensor, training: bool = True) -> Tensor:
    """Zero each element with probability `p` and scale the rest by 1 / (1 - p): see `Dropout`."""
    p = P.argument(p, x, "dropout", nested=True)
    return _dropout(x, p) if training else x


def _dropout(x: Tensor, p: float | Tensor) -> Tensor:
    if isinstance(p, Tensor) or is_compiling():
        p = p if isinstance(p, Tensor) else as_rate_tensor(p)
        return torch.where(custom_ops.draw_elements(x, p), 0.0, x * keep_scale(p))
    if p == 0.0:
        return x
    # On the CPU, PyTorch draws one random number per element on one thread, and rounds 1 / (1 - p) to the dtype of x.
    small = x.numel() < _MIN_NATIVE_ELEMENTS and x.dtype not in HALF
    if small or x.is_nested or not x.is_cpu or internals.is_tracing():
        return torch.dropout(x, p, True)
    if internals.functorch_stack() is not None and {*internals.vmap_randomness()} - {"same"}:
        return torch.where(torch.rand_like(x, dtype=torch.float32) < p, 0.0, x * keep_scale(p))
    if type(x) not in internals.PLAIN_TYPES and internals.wraps_results(x):
        return internals.on_plain_tensor(_dropout, x, p)
    return apply_mask(x, *drawing.draw_elements(x, p))


class Dropout(DropRegularizer):
    """Zero each element with probability `p` and scale the rest by 1 / (1 - p).

    Args:
        p: probability of dropping an element, in [0, 1].
        keep_prob: 1 - p, instead of `p`.

    Shape: any.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> Dropout(p=0.5)(torch.ones(6))
        tensor([0., 0., 2., 0., 0., 0.])

    Reference: Srivastava et al. 2014, "Dropout: A simple way to prevent neural networks from overfitting".
    """

    independent_samples = True

    def regularize(self, x: Tensor, rate: Any) -> Tensor:
        floating(x, "dropout", nested=True)
        return _dropout(x, rate)


def dropout1d(x: Tensor, p: float | Tensor, training: bool = True) -> Tensor:
    """Zero whole channels of (N, C, L): see `Dropout1d`."""
    return _drop_channels(x, p, Dropout1d, training)


def dropout2d(x: Tensor, p: float | Tensor, training: bool = True) -> Tensor:
    """Zero whole channels of (N, C, H, W): see `Dropout2d`."""
    return _drop_channels(x, p, Dropout2d, training)


def dropout3d(x: Tensor, p: float | Tensor, training: bool = True) -> Tensor:
    """Zero whole channels of (N, C, D, H, W): see `Dropout3d`."""
    return _drop_channels(x, p, Dropout3d, training)


def _drop_channels(x: Tensor, p: float | Tensor, cls: type[_ChannelDropout], training: bool = True) -> Tensor:
    p = P.argument(p, x, cls.__name__.lower(), cls.axes)
    if not training:
        return x
    if isinstance(p, Tensor) or x.dtype in HALF or internals.functorch_stack() is not None:
        return slice_dropout(x, p, x.shape[:2] + (1,) * (x.dim() - 2))
    return torch.feature_dropout(x, p, True)  # one call instead of four


class _ChannelDropout(Dropout):
    independent_samples = True

    def regularize(self, x: Tensor, rate: Any) -> Tensor:
        return _drop_channels(x, rate, type(self))


class Dropout1d(_ChannelDropout):
    """Zero whole channels with probability `p` and scale the rest by 1 / (1 - p).

    Args:
        p: probability of dropping a channel, in [0, 1].
        keep_prob: 1 - p, instead of `p`.

    Shape: (N, C, L). With tokens (N, L, C) it would drop whole tokens.

    Reference: Tompson et al. 2015, "Efficient object localization using convolutional networks",
    arXiv:1411.4280 (SpatialDropout).
    """

    axes = "N C L"


class Dropout2d(_ChannelDropout):
    """Zero whole channels of (N, C, H, W) maps with probability `p`. Warns if a map looks like NHWC.

    Reference: Tompson et al. 2015, arXiv:1411.4280 (SpatialDropout).
    """

    axes = "N C H W"


class Dropout3d(_ChannelDropout):
    """Zero whole channels of (N, C, D, H, W) volumes with probability `p`. Reference: Tompson et al. 2015."""

    axes = "N C D H W"


def alpha_dropout(x: Tensor, p: float | Tensor, training: bool = True) -> Tensor:
    """Set elements to SELU's negative saturation value, keeping mean and variance: see `AlphaDropout`."""
    p = P.argument(p, x, "alpha_dropout")
    if not training:
        return x
    if isinstance(p, Tensor):
        return _saturate(x, (~custom_ops.draw_elements(x, p)).to(x.dtype), p)
    return F.alpha_dropout(x, p, True) if p > 0.0 else x


def feature_alpha_dropout(x: Tensor, p: float | Tensor, training: bool = True) -> Tensor:
    """`alpha_dropout` of whole channels of (N, C, ...): see `FeatureAlphaDropout`."""
    p = P.argument(p, x, "feature_alpha_dropout", FeatureAlphaDropout.axes)
    if not training:
        return x
    if isinstance(p, Tensor):
        return _saturate(x, slice_mask(x, p, (*x.shape[:2], *[1] * (x.dim() - 2))), p)
    return F.feature_alpha_dropout(x, p, True) if p > 0.0 else x


def _saturate(x: Tensor, kept: Tensor, p: Tensor) -> Tensor:
    """`AlphaDropout` where `kept` is 0; all zeros if p is 1, as in PyTorch."""
    a = torch.where(p < 1.0, ((_SATURATION**2 * p + 1.0) * (1.0 - p)).rsqrt(), 0.0)
    return (x * kept + (kept - 1.0) * _SATURATION) * a + _SATURATION * a * p


class AlphaDropout(DropRegularizer):
    """Set elements to SELU's negative saturation with probability `p`, then restore mean and variance.

    Args:
        p: probability to drop, in [0, 1].
        keep_prob: 1 - p, instead of `p`.

    Shape: any. Inputs with mean 0 and variance 1 keep both.

    Reference: Klambauer et al. 2017, "Self-normalizing neural networks", arXiv:1706.02515, "New Dropout Technique".
    """

    independent_samples = True
    regularize = staticmethod(alpha_dropout)


class FeatureAlphaDropout(DropRegularizer):
    """`AlphaDropout` of whole channels of (N, C, ...).

    Reference: Klambauer et al. 2017, arXiv:1706.02515.
    """

    axes = "N C ..."
    independent_samples = True
    regularize = staticmethod(feature_alpha_dropout)

"""The regularizers in compiled code, where the rate is a 0-d tensor on the CPU, so that one graph serves all rates.

A Python float that changes would be compiled in, or dropped at another rate without a word.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hookdrop.kernels import custom_ops as graph

_SATURATION = 1.7580993408473766
"""Minus what SELU tends to: scale * alpha."""


def dropout(x: Tensor, p: Tensor) -> Tensor:
    """Elements."""
    return torch.where(_dropped(x, p), 0.0, x * _of_the_rest(p))


def slice_dropout(x: Tensor, p: Tensor, shape: Sequence[int]) -> Tensor:
    """Slices of `x`, such as its channels: one draw for each element of `shape`, which broadcasts to `x`."""
    return x * _kept(x, p, shape) * _of_the_rest(p)


def slice_factor(x: Tensor, p: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """What slices of `x` are to be multiplied by."""
    return _kept(x, p, shape).to(dtype) * _of_the_rest(p)


def alpha_dropout(x: Tensor, p: Tensor) -> Tensor:
    """Elements, set to SELU's saturation."""
    return _saturated(x, (~_dropped(x, p)).to(x.dtype), p)


def feature_alpha_dropout(x: Tensor, p: Tensor) -> Tensor:
    """Channels of (N, C, ...), set to SELU's saturation."""
    return _saturated(x, _kept(x, p, (*x.shape[:2], *[1] * (x.dim() - 2))), p)


def gaussian_dropout(x: Tensor, p: Tensor) -> Tensor:
    """X * N(1, p / (1 - p))."""
    return x * (1.0 + torch.randn_like(x) * (p / (1.0 - p)).sqrt())


def gaussian_noise(x: Tensor, std: Tensor) -> Tensor:
    """X + N(0, std^2)."""
    return x + torch.randn_like(x) * std


def _dropped(x: Tensor, p: Tensor) -> Tensor:
    # On a CPU the compiler's random numbers take longer than all else; elsewhere they are drawn where they are used.
    return graph.draw_elements(x, p) if x.device.type == "cpu" else torch.rand_like(x, dtype=torch.float32) < p


def _kept(x: Tensor, p: Tensor, shape: Sequence[int]) -> Tensor:
    # float32 whatever `x` is: in bfloat16 no random number lies between .998 and 1.
    return (torch.rand(tuple(shape), dtype=torch.float32, device=x.device) >= p).to(x.dtype)


def _of_the_rest(p: Tensor) -> Tensor:
    """1 / (1 - p), where anything is left."""
    return torch.where(p < 1.0, 1.0 / (1.0 - p), 1.0)


def _saturated(x: Tensor, kept: Tensor, p: Tensor) -> Tensor:
    """Klambauer et al. 2017, arXiv:1706.02515, section 3; all zero where nothing is kept, as in PyTorch."""
    a = torch.where(p < 1.0, ((_SATURATION**2 * p + 1.0) * (1.0 - p)).rsqrt(), 0.0)
    return (x * kept + (kept - 1.0) * _SATURATION) * a + _SATURATION * a * p

"""Cutout: zeroing one square of each sample."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from hookdrop.kernels.random_numbers import rand, randint
from hookdrop.regularizers.base import Rate, Regularizer
from hookdrop.utils.validation import count

_RATE = Rate("p", kind="factor")
"""Not the fraction of dropped elements."""


def cutout(x: Tensor, size: int | tuple[int, int], p: float | Tensor = 1.0, training: bool = True) -> Tensor:
    """Zero one rectangle per sample of (N, C, H, W), in all channels and without rescaling: see `Cutout`."""
    height, width = height_and_width(size, "cutout")
    p = _RATE.argument(p, x, "cutout", Cutout.axes)
    if not training or x.numel() == 0 or (not isinstance(p, Tensor) and p == 0.0):
        return x
    n, _, h, w = x.shape
    # Always float32: bfloat16 has no random numbers between .998 and 1.
    cut_N = rand((n,), torch.float32, x.device) < p
    rows_NH = _window_mask(n, h, height, x.device)
    columns_NW = _window_mask(n, w, width, x.device)
    cut_N1HW = (cut_N[:, None, None] & rows_NH[:, :, None] & columns_NW[:, None, :])[:, None]
    return x * (~cut_N1HW).to(x.dtype)


def height_and_width(size: object, owner: str) -> tuple[int, int]:
    """Return `size` as (height, width)."""
    if not isinstance(size, (tuple, list)):
        return (count(size, "size", owner),) * 2
    if len(size) != 2:
        raise ValueError(f"{owner}: size must be one number or (height, width), got {size!r}.")
    return count(size[0], "size", owner), count(size[1], "size", owner)


def _window_mask(samples: int, length: int, size: int, device: torch.device) -> Tensor:
    """(samples, length): True inside a window with a uniformly random center."""
    first = randint(length, (samples, 1), device) - size // 2
    position = torch.arange(length, device=device)
    return (position >= first) & (position < first + size)


class Cutout(Regularizer):
    """Zero one square of each sample in all channels, without rescaling.

    `p` is the probability of cutting a sample, not the fraction of zeroed elements. The expected fraction is
    `p * g(height, H) * g(width, W)`, with `g(s, n) = (s * n - s**2 // 4) / n**2` for s <= n: the center may be any
    pixel, so part of the square may lie outside the map.

    Args:
        size: edge of the square in pixels of the hooked map, or (height, width) of a rectangle.
        p: probability of cutting each sample, in [0, 1].

    Shape: (N, C, H, W). Unlike the paper, it cuts the activations of the hooked layer (to cut images, hook the model's
    first layer with `at="input"`), and it does not reduce an odd `size` by 1 as the paper's code does.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> Cutout(size=3)(torch.ones(1, 1, 4, 6))
        tensor([[[[1., 1., 1., 1., 1., 1.],
                  [1., 1., 1., 1., 1., 1.],
                  [1., 1., 1., 1., 0., 0.],
                  [1., 1., 1., 1., 0., 0.]]]])

    Reference: DeVries & Taylor 2017, "Improved regularization of convolutional neural networks with Cutout",
    arXiv:1708.04552.
    """

    rate: ClassVar[Rate] = _RATE
    axes = "N C H W"
    independent_samples = True

    def __init__(self, size: int | tuple[int, int], p: float = 1.0) -> None:
        super().__init__()
        height, width = height_and_width(size, self.title)
        self.size: int | tuple[int, int] = height if height == width else (height, width)
        self.p = self.rate.valid(p, self.title)

    def regularize(self, x: Tensor, rate: Any) -> Tensor:
        return cutout(x, self.size, rate)

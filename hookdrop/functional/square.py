"""Cutout: one square of each sample."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hookdrop.errors import ShapeError
from hookdrop.functional.rates import checked_rate
from hookdrop.utils.validation import count, floating


def cutout(x: Tensor, size: int | tuple[int, int], p: float | Tensor = 1.0, training: bool = True) -> Tensor:
    """Zero one rectangle of each sample in all channels, without rescaling.

    Args:
        x: (N, C, H, W), floating point.
        size: edge in pixels, or (height, width). The centre is any pixel alike, and what lies outside is cut off.
        p: the probability of each sample to be cut, in [0, 1].
        training: False returns `x` itself.

    Returns:
        A tensor like `x`. `p * g(height, H) * g(width, W)` of it is zero in expectation, where
        `g(s, n) = (s * n - s**2 // 4) / n**2` for s up to n.

    Raises:
        ShapeError: not (N, C, H, W).

    Reference: DeVries & Taylor 2017, arXiv:1708.04552.
    """
    floating(x, "cutout")
    p = checked_rate(p, owner="cutout")
    height, width = edges(size, "cutout")
    check_map(x.shape, "cutout", "cuts squares")
    if not training or x.numel() == 0 or (not isinstance(p, Tensor) and p == 0.0):
        return x
    n, _, h, w = x.shape
    # float32 whatever `x` is: in bfloat16 no random number lies between .998 and 1.
    cut_N = torch.rand(n, dtype=torch.float32, device=x.device) < p
    rows_NH = _covered(n, h, height, x.device)
    columns_NW = _covered(n, w, width, x.device)
    cut_N1HW = (cut_N[:, None, None] & rows_NH[:, :, None] & columns_NW[:, None, :])[:, None]
    return x * (~cut_N1HW).to(x.dtype)


def edges(size: object, owner: str) -> tuple[int, int]:
    """`size` as (height, width)."""
    if not isinstance(size, (tuple, list)):
        return (count(size, "size", owner),) * 2
    if len(size) != 2:
        raise ValueError(f"{owner}: size must be one number or (height, width), got {size!r}.")
    return count(size[0], "size", owner), count(size[1], "size", owner)


def check_map(shape: Sequence[int], owner: str, does: str) -> None:
    """Raise `ShapeError` unless `shape` is (N, C, H, W)."""
    if len(shape) == 4:
        return
    use = {
        3: "for tokens (N, L, C) use TokenDropout(p=...)",
        5: "for (N, C, D, H, W) use DropBlock(p=...) or Dropout3d(p=...)",
    }.get(len(shape), "use Dropout(p=...)")
    raise ShapeError(f"got {tuple(shape)}: {owner} {does} of (N, C, H, W).\n  {use}.")


def _covered(samples: int, length: int, size: int, device: torch.device) -> Tensor:
    """(samples, length): which places of an axis lie in a window whose centre is any of them alike."""
    first = torch.randint(length, (samples, 1), device=device) - size // 2
    place = torch.arange(length, device=device)
    return (place >= first) & (place < first + size)

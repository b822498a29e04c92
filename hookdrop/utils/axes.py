"""How a tensor is read as a map of features: where its channels are, and which grid its tokens lie on."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from hookdrop.errors import ShapeError

MOST_PREFIX_TOKENS = 8
"""Class, distillation and register tokens, together."""


def channel_axis(shape: Sequence[int]) -> int:
    """The axis of the channels, as far as a shape tells.

    Axis 1 of a map (N, C, H, W), the last of (N, H, W, C), which is known by H = W != C, of tokens (N, L, C) and of
    features (N, C).

    Example:
        >>> channel_axis((8, 64, 14, 14)), channel_axis((8, 7, 7, 768)), channel_axis((8, 197, 384))
        (1, 3, 2)
    """
    if len(shape) == 4 and shape[1] == shape[2] != shape[3]:
        return 3
    return len(shape) - 1 if len(shape) < 4 else 1


def as_map(x: Tensor, image: Sequence[int], grid: Sequence[int] | None = None) -> Tensor:
    """`x` as (N, C, h, w), whatever a layer gives.

    Args:
        x: (N, C, h, w), (N, h, w, C), or tokens (N, L, C), those of the picture last.
        image: height and width of the picture: a grid of tokens has the same proportions.
        grid: rows and columns of the tokens, if that can't be told.

    Raises:
        ShapeError: it is none of these, or its tokens make no grid of these proportions.
    """
    if x.dim() == 4:
        # The axis without which the rest is most like the picture.
        unlike = {axis: _unlike(x.shape[1:3] if axis == 3 else x.shape[2:], image) for axis in (1, 3)}
        return x.movedim(min(unlike, key=lambda axis: unlike[axis]), 1)
    if x.dim() != 3:
        raise ShapeError(f"got {tuple(x.shape)}: neither a map (N, C, H, W) nor tokens (N, L, C).")
    rows, columns = _grid(x.shape[1], image) if grid is None else grid
    if rows * columns > x.shape[1]:
        raise ShapeError(f"got {tuple(x.shape)}: {x.shape[1]} tokens do not fill a grid of {rows} x {columns}.")
    return x[:, -rows * columns :].reshape(len(x), rows, columns, -1).movedim(-1, 1)


def _unlike(sizes: Sequence[int], image: Sequence[int]) -> float:
    """How far the proportions of two rectangles are apart; 0 where they are the same."""
    return abs(math.log(sizes[0] * image[1] / (sizes[1] * image[0])))


def _grid(tokens: int, image: Sequence[int]) -> tuple[int, int]:
    height, width = image
    for count in range(tokens, max(0, tokens - MOST_PREFIX_TOKENS - 1), -1):
        rows = round((count * height / width) ** 0.5)
        if rows and count % rows == 0 and rows * width == count // rows * height:
            return rows, count // rows
    raise ShapeError(
        f"got {tokens} tokens, which make no grid of the proportions {height} x {width}, with up to "
        f"{MOST_PREFIX_TOKENS} tokens before it.\n  say which it is: grid=(rows, columns)"
    )

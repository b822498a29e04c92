"""Interpret tensors as feature maps: the channel axis and the token grid."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn

from hookdrop.utils.errors import ShapeError

MAX_PREFIX_TOKENS = 8
"""Upper bound on class, distillation and register tokens combined."""

_SPATIAL_AXES: tuple[tuple[int, tuple[type[nn.Module], ...]], ...] = (
    (1, (nn.Conv1d, nn.ConvTranspose1d, nn.InstanceNorm1d)),
    (2, (nn.Conv2d, nn.ConvTranspose2d, nn.InstanceNorm2d)),
    (3, (nn.Conv3d, nn.ConvTranspose3d, nn.InstanceNorm3d)),
)
_BATCHED = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.GroupNorm)


def channel_axis(shape: Sequence[int]) -> int:
    """Infer the channel axis from a shape.

    It is axis 1 of a map (N, C, H, W), and the last axis of (N, H, W, C), recognized by H = W != C, of tokens
    (N, L, C) and of features (N, C).

    Example:
        >>> channel_axis((8, 64, 14, 14)), channel_axis((8, 7, 7, 768)), channel_axis((8, 197, 384))
        (1, 3, 2)
    """
    if len(shape) == 4 and shape[1] == shape[2] != shape[3]:
        return 3
    return len(shape) - 1 if len(shape) < 4 else 1


def channel_axis_of(module: nn.Module, shape: Sequence[int]) -> int | None:
    """Return the channel axis of the output of a convolution, norm or linear layer, or None for other layers.

    Example:
        >>> [channel_axis_of(nn.Conv2d(3, 8, 1), shape) for shape in ((8, 14, 14), (2, 8, 14, 14))]
        [0, 1]
        >>> channel_axis_of(nn.Linear(3, 8), (5, 7, 8)), channel_axis_of(nn.ReLU(), (5, 8))
        (2, None)
    """
    for spatial, classes in _SPATIAL_AXES:
        if isinstance(module, classes):
            return len(shape) - spatial - 1
    if isinstance(module, _BATCHED):
        return 1
    if isinstance(module, nn.LayerNorm) and len(shape) == 4 and shape[-1] != module.normalized_shape[-1]:
        return 1  # ConvNeXt's LayerNorm2d permutes the map and permutes it back
    return len(shape) - 1 if isinstance(module, nn.Linear | nn.LayerNorm) else None


def as_map(x: Tensor, image: Sequence[int], grid: Sequence[int] | None = None) -> Tensor:
    """Convert a map (N, C, h, w) or (N, h, w, C), or tokens (N, L, C) that end with the image's, to (N, C, h, w).

    A token grid has the aspect ratio of the image (height, width), unless `grid` gives its rows and columns.
    """
    if x.dim() == 4:
        # The channel axis is the one whose removal leaves the aspect ratio closest to the image's.
        sizes = {1: x.shape[2:], 3: x.shape[1:3]}
        unlike = {axis: abs(math.log(h * image[1] / (w * image[0]))) for axis, (h, w) in sizes.items()}
        return x.movedim(min(unlike, key=unlike.__getitem__), 1)
    if x.dim() != 3:
        raise ShapeError(f"got {tuple(x.shape)}: expected a map (N, C, H, W) or tokens (N, L, C).")
    rows, columns = _grid(x.shape[1], image) if grid is None else grid
    if rows * columns > x.shape[1]:
        raise ShapeError(f"got {tuple(x.shape)}: {x.shape[1]} tokens do not fill a grid of {rows} x {columns}.")
    return x[:, -rows * columns :].reshape(len(x), rows, columns, -1).movedim(-1, 1)


def _grid(tokens: int, image: Sequence[int]) -> tuple[int, int]:
    height, width = image
    for kept in range(tokens, max(0, tokens - MAX_PREFIX_TOKENS - 1), -1):
        rows = round((kept * height / width) ** 0.5)
        if rows and kept % rows == 0 and rows * width == kept // rows * height:
            return rows, kept // rows
    raise ShapeError(
        f"got {tokens} tokens, which do not form a grid with the aspect ratio {height} x {width}, with or without "
        f"up to {MAX_PREFIX_TOKENS} prefix tokens.\n  pass the grid: grid=(rows, columns)"
    )

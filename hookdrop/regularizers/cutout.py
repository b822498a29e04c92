"""Cutout as a module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from hookdrop import functional
from hookdrop.functional.square import check_map, edges
from hookdrop.regularizers.base import Regularizer, map_reading, nhwc_doubt


class Cutout(Regularizer):
    """Zero one square of each sample in all channels, without rescaling.

    `p` is the probability of a sample to be cut, which a schedule drives, and not the fraction that is zeroed. That
    is in expectation `p * g(height, H) * g(width, W)`, with `g(s, n) = (s * n - s**2 // 4) / n**2` for s up to n: the
    centre may be any pixel, and what of the square lies outside of the map is lost.

    Args:
        size: edge of the square in pixels of the hooked map, or (height, width) of a rectangle.
        p: probability of each sample to be cut, in [0, 1].

    Shape: (N, C, H, W). Departs from the paper in that it cuts activations where it is hooked on a layer (for its
    images: hook the model's first layer with `at="input"`), and that an odd `size` is taken as it is, where the
    paper's code cuts one pixel less.

    Raises:
        ShapeError: in forward, if the input is no map.

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

    probability: ClassVar[bool] = False

    def __init__(self, size: int | tuple[int, int], p: float = 1.0) -> None:
        super().__init__()
        height, width = edges(size, self.title)
        self.size: int | tuple[int, int] = height if height == width else (height, width)
        self.p = self.valid_rate(p)

    def check(self, shape: Sequence[int]) -> None:
        check_map(shape, self.title, "cuts squares")

    def reading(self, shape: Sequence[int]) -> str:
        return map_reading(shape, 1)

    def doubts(self, shape: Sequence[int]) -> list[str]:
        found = nhwc_doubt(shape, 1, "it would cut rows and channels; hook a layer that gives NCHW.")
        (height, width), (h, w) = edges(self.size, self.title), shape[2:]
        if h and w and height >= 2 * h - 1 and width >= 2 * w - 1:
            found.append(
                f"size={self.size} covers the whole {h}x{w} map wherever its centre is: each sample that is cut is "
                "zero, which is DropPath without its scale."
            )
        return found

    def regularize_at(self, x: Tensor, rate: float | Tensor) -> Tensor:
        return functional.cutout(x, self.size, rate)

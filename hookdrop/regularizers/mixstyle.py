"""MixStyle as a module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from hookdrop import functional
from hookdrop.functional.mixing import check_style, valid_alpha
from hookdrop.regularizers.base import Regularizer, map_reading, nhwc_doubt


class MixStyle(Regularizer):
    """With probability `p`, mix each sample's style (mean and deviation of its channels) with another sample's.

    It belongs after the first blocks of a network, where statistics are style (a ResNet's `layer1`, `layer2`).

    Args:
        p: probability that a batch is mixed, in [0, 1]: drawn once for all its samples, and driven by a schedule.
        alpha: above 0; a sample's own style has the weight lambda ~ Beta(alpha, alpha), drawn for each sample.

    Shape: (N, C, H, W), N above 1. Statistics are taken over H and W and regarded as constants in the gradient.
    Under DistributedDataParallel the partner is one of the same rank.

    Raises:
        ShapeError: in forward, if the input is no map, or one of a single pixel.

    Reference: Zhou et al. 2021, "Domain generalization with MixStyle", arXiv:2104.02008 (the version with random
    shuffling).
    """

    probability: ClassVar[bool] = False
    drops: ClassVar[bool] = False

    def __init__(self, p: float = 0.5, alpha: float = 0.1) -> None:
        super().__init__()
        self.p = self.valid_rate(p)
        self.alpha = valid_alpha(alpha, self.title)

    def check(self, shape: Sequence[int]) -> None:
        check_style(shape, self.title)

    def reading(self, shape: Sequence[int]) -> str:
        return f"N={shape[0]} {map_reading(shape, 1)}"

    def doubts(self, shape: Sequence[int]) -> list[str]:
        found = nhwc_doubt(shape, 1, "it would mix the statistics of rows; hook a layer that gives NCHW.")
        if shape[0] == 1:
            found.append("a batch of one has no other sample whose style could be mixed in: MixStyle does nothing.")
        return found

    def regularize_at(self, x: Tensor, rate: float | Tensor) -> Tensor:
        return functional.mix_style(x, rate, self.alpha)

"""ShakeDrop: random factors on a residual branch, different ones forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from hookdrop.kernels.random_numbers import rand
from hookdrop.regularizers.base import Rate, Regularizer
from hookdrop.utils.validation import number

_RATE = Rate("p", kind="noise", open_end=True)

Range = tuple[float, float]


def shake_drop(
    x: Tensor,
    p: float | Tensor = 0.5,
    alpha: Range = (-1.0, 1.0),
    beta: Range = (0.0, 1.0),
    training: bool = True,
) -> Tensor:
    """With probability `p`, multiply a sample and its gradient by different random factors: see `ShakeDrop`."""
    alpha, beta = _alpha_range(alpha, "shake_drop"), _range(beta, "beta", "shake_drop")
    p = _RATE.argument(p, x, "shake_drop", ShakeDrop.axes)
    if not training or x.numel() == 0 or (not isinstance(p, Tensor) and p == 0.0):
        return x
    shape = (x.shape[0],) + (1,) * (x.dim() - 1)
    # In low precision, round the product only.
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    kept = rand(shape, torch.float32, x.device) >= p
    perturbing = (_uniform(shape, x.device, limits).to(wide.dtype) for limits in (alpha, beta))
    mean = 1.0 - p * (1.0 - sum(alpha) / 2.0)
    forward, backward = (torch.where(kept, 1.0, factor) / mean for factor in perturbing)
    # The gradient sees only the first summand. For a kept sample, the second is 0.
    return torch.addcmul(wide * backward, wide.detach(), forward - backward).to(x.dtype)


def _uniform(shape: Sequence[int], device: torch.device, limits: Range) -> Tensor:
    return limits[0] + (limits[1] - limits[0]) * rand(shape, torch.float32, device)


def _range(value: object, name: str, owner: str) -> Range:
    """Return `value` as (low, high)."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ValueError(f"{owner}: {name} must be a range (low, high), got {value!r}.\n  a constant c is (c, c).")
    low, high = number(value[0], name, owner), number(value[1], name, owner)
    if low > high:
        raise ValueError(f"{owner}: {name} must be a range (low, high), got {value!r}.\n  write {name}={(high, low)}")
    return low, high


def _alpha_range(value: object, owner: str) -> Range:
    """Return the range of the forward factor, whose mean must not be negative."""
    low, high = _range(value, "alpha", owner)
    if low + high < 0.0:
        raise ValueError(
            f"{owner}: alpha must not be negative on average, got {value!r}: the output is divided by the mean factor, "
            f"which could be 0.\n  write alpha={(low, -low)}"
        )
    return low, high


class ShakeDrop(Regularizer):
    """With probability `p`, multiply a sample by a random alpha, and its gradient by another random number beta.

    For b = 0 with probability `p`, else 1, and alpha and beta uniform, the output is x * (b + alpha - b * alpha) / m
    and the gradient is multiplied by (b + beta - b * beta) / m. All three are drawn for each sample. m is the mean of
    the first factor, 1 - p for the default `alpha`.

    Hook the last layer of a residual branch, before the addition, as for `DropPath`; it should be a batch norm. With
    `p_scale="depth"`, the rate grows from p / L at the first of L sites to p at the last, as in the paper.

    Args:
        p: probability of perturbing a sample, in [0, 1).
        alpha: range (low, high) of the forward factor. Its mean must not be negative.
        beta: range (low, high) of the backward factor.

    Shape: (N, ...).

    Unlike the paper, this divides by m in training instead of multiplying by m in eval mode, so that eval is the
    identity. The authors' code draws b once per batch, and alpha and beta for each element.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> x = torch.ones(4, 1, requires_grad=True)
        >>> y = ShakeDrop(p=0.5)(x)
        >>> y.sum().backward()
        >>> torch.cat([y.detach(), x.grad], dim=1)
        tensor([[-0.7703,  0.9113],
                [ 2.0000,  2.0000],
                [-0.0396,  0.6978],
                [ 1.5858,  0.8034]])

    Reference: Yamada et al. 2018, "ShakeDrop regularization for deep residual learning", arXiv:1802.02375.
    """

    rate: ClassVar[Rate] = _RATE
    axes = "N ..."
    independent_samples = True

    def __init__(self, p: float = 0.5, alpha: Range = (-1.0, 1.0), beta: Range = (0.0, 1.0)) -> None:
        super().__init__()
        self.p = self.rate.valid(p, self.title)
        self.alpha = _alpha_range(alpha, self.title)
        self.beta = _range(beta, "beta", self.title)

    def regularize(self, x: Tensor, rate: Any) -> Tensor:
        return shake_drop(x, rate, self.alpha, self.beta)

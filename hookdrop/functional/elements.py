"""Dropout of elements."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hookdrop import in_graph
from hookdrop.functional.rates import HALF, checked_rate
from hookdrop.kernels.drawing import Elements
from hookdrop.kernels.masking import masked
from hookdrop.utils.validation import floating

_WORTHWHILE = 2**15
"""Elements from which on our own dropout is faster than PyTorch's."""


def dropout(x: Tensor, p: float | Tensor, training: bool = True) -> Tensor:
    """Zero each element with probability `p`, scale the rest by 1 / (1 - p).

    Args:
        x: any shape, floating point.
        p: in [0, 1].
        training: False returns `x` itself.

    Example:
        >>> dropout(torch.ones(3), p=1.0)
        tensor([0., 0., 0.])

    Reference: Srivastava et al. 2014, "Dropout: A simple way to prevent neural networks from overfitting".
    """
    floating(x, "dropout", nested=True)
    p = checked_rate(p, owner="dropout")
    if isinstance(p, Tensor):
        return in_graph.dropout(x, p) if training else x
    if not training or p == 0.0:
        return x
    # On a CPU PyTorch draws a random number for each element, on one thread, and in low precision rounds 1 / (1 - p).
    small = x.numel() < _WORTHWHILE and x.dtype not in HALF
    if small or x.is_nested or x.device.type != "cpu" or torch._C._get_tracing_state() is not None:
        return F.dropout(x, p, True)
    return masked(x, *Elements(p)(x))

"""Dropout of slices: channels, samples, tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hookdrop import in_graph
from hookdrop.functional.rates import HALF


def slice_dropout(x: Tensor, p: float | Tensor, shape: tuple[int, ...], training: bool) -> Tensor:
    """X * Bernoulli(1 - p) / (1 - p), one draw for each element of `shape`, which broadcasts to `x`."""
    if isinstance(p, Tensor):
        return in_graph.slice_dropout(x, p, shape) if training else x
    if not training or p == 0.0:
        return x
    mask = slice_mask(x, p, shape)
    if p == 1.0:
        return x * mask
    scale = 1.0 / (1.0 - p)
    # In low precision the scale is applied by itself, where it is not rounded before it is used.
    return x * mask * scale if x.dtype in HALF else x * mask.mul_(scale)


def slice_mask(x: Tensor, p: float, shape: tuple[int, ...]) -> Tensor:
    """A mask of `shape` in the dtype of `x`: 0 with probability `p`, else 1."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return x.new_empty(shape).bernoulli_(1.0 - p)
    # The same numbers drawn; in place, `vmap` refuses a tensor that slices share, and crashes in another `vmap`.
    ones = torch.ones(shape, dtype=torch.float32, device=x.device)
    return (F.dropout(ones, p, True) != 0.0).to(x.dtype)

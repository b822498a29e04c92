"""Dropout of whole slices, such as channels, samples and tokens, with one draw per slice."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from hookdrop.kernels.masking import HALF
from hookdrop.kernels.random_numbers import rand
from hookdrop.utils.torch_internals import functorch_stack


def slice_dropout(x: Tensor, p: float | Tensor, shape: Sequence[int]) -> Tensor:
    """Return `x` * Bernoulli(1 - p) / (1 - p), with one draw per element of `shape`, which broadcasts to `x`."""
    if isinstance(p, Tensor):
        return x * slice_mask(x, p, shape) * keep_scale(p)
    if p == 0.0:
        return x
    mask = slice_mask(x, p, shape)
    # In low precision, apply the scale last: a scaled mask would round it first.
    return x * mask * keep_scale(p) if x.dtype in HALF else x * mask.mul_(keep_scale(p))


def slice_mask(x: Tensor, p: float | Tensor, shape: Sequence[int]) -> Tensor:
    """Draw a mask of `shape` in the dtype of `x`: 0 with probability `p`, else 1."""
    if isinstance(p, Tensor) or is_compiling():
        # Always float32: bfloat16 has no random numbers between .998 and 1.
        return (rand(shape, torch.float32, x.device) >= p).to(x.dtype)
    if functorch_stack() is None:
        return x.new_empty(shape).bernoulli_(1.0 - p)
    # This draws the same numbers. An in-place draw fails in `vmap` for shared tensors, and crashes in nested `vmap`.
    ones = torch.ones(tuple(shape), dtype=torch.float32, device=x.device)
    return (F.dropout(ones, p, True) != 0.0).to(x.dtype)


def keep_scale(p: float | Tensor) -> float | Tensor:
    """Return 1 / (1 - p), or 1 if p is 1."""
    if isinstance(p, Tensor):
        return torch.where(p < 1.0, 1.0 / (1.0 - p), 1.0)
    return 1.0 / (1.0 - p) if p < 1.0 else 1.0

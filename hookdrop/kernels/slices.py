"""Dropout of slices: one draw for a channel, a sample or a token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from hookdrop.kernels.masking import HALF
from hookdrop.utils.torch_internals import functorch_stack


def slice_dropout(x: Tensor, p: float | Tensor, shape: Sequence[int]) -> Tensor:
    """X * Bernoulli(1 - p) / (1 - p), one draw for each element of `shape`, which broadcasts to `x`."""
    if isinstance(p, Tensor):
        return x * slice_mask(x, p, shape) * of_the_rest(p)
    if p == 0.0:
        return x
    mask = slice_mask(x, p, shape)
    # In low precision the scale is applied last, where it is not rounded before it is used.
    return x * mask * of_the_rest(p) if x.dtype in HALF else x * mask.mul_(of_the_rest(p))


def slice_mask(x: Tensor, p: float | Tensor, shape: Sequence[int]) -> Tensor:
    """A mask of `shape` in the dtype of `x`: 0 with probability `p`, else 1."""
    if isinstance(p, Tensor) or is_compiling():
        # float32 whatever `x` is: in bfloat16 no random number lies between .998 and 1.
        return (torch.rand(tuple(shape), dtype=torch.float32, device=x.device) >= p).to(x.dtype)
    if functorch_stack() is None:
        return x.new_empty(shape).bernoulli_(1.0 - p)
    # The same numbers drawn; in place, `vmap` refuses a tensor that slices share, and crashes in another `vmap`.
    ones = torch.ones(tuple(shape), dtype=torch.float32, device=x.device)
    return (F.dropout(ones, p, True) != 0.0).to(x.dtype)


@overload
def of_the_rest(p: float) -> float: ...
@overload
def of_the_rest(p: Tensor) -> Tensor: ...
def of_the_rest(p: float | Tensor) -> float | Tensor:
    """1 / (1 - p), where anything is left; else 1."""
    if isinstance(p, Tensor):
        return torch.where(p < 1.0, 1.0 / (1.0 - p), 1.0)
    return 1.0 / (1.0 - p) if p < 1.0 else 1.0

"""Applying a mask and a scale: a linear map, which is its own derivative and transpose. Dropout of whole slices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from hookdrop.core.torch_internals import forward_ad_level, functorch_stack, has_storage, is_zero_tensor
from hookdrop.kernels.accelerators import ACCELERATORS
from hookdrop.kernels.blocks import Blocks
from hookdrop.kernels.random_numbers import rand

_INT = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
HALF = (torch.float16, torch.bfloat16)


def apply_mask_no_grad(x: Tensor, dropped: Tensor, scale: Tensor, blocks: Blocks | None = None) -> Tensor:
    """Return `x * scale` with zeros where `dropped`, even for NaN and infinity. It is not differentiable.

    `dropped` is a bool mask that broadcasts to `x`, or, of `blocks`, the integer seeds or `Blocks.packed` in uint8.
    `scale` is 0-d, or one scale per sample; with a packed mask also the counters of `Accelerator.draw`.
    """
    if (masked := ACCELERATORS[x.device].mask(x, dropped, scale, blocks)) is not None:
        return masked
    if dropped.dtype == torch.uint8:
        return apply_mask_no_grad(x, *_as_mask(dropped, scale, blocks))
    y, writable = scaled(x, scale), has_storage(x) and not is_zero_tensor(x)
    if writable and blocks is not None and blocks.channels == y.shape[blocks.channel]:
        return blocks.zero_(y, dropped)
    mask, _ = _as_mask(dropped, scale, blocks)
    if not writable:
        return y.masked_fill(mask, 0.0)
    # NaN and infinity times 0 are NaN, so clear all bits instead.
    bits = _INT[y.element_size()]
    y.view(bits).bitwise_and_(mask.view(torch.int8).sub(1).to(bits))
    return y


def apply_mask(x: Tensor, dropped: Tensor, scale: Tensor, blocks: Blocks | None = None) -> Tensor:
    """`apply_mask_no_grad` with derivatives of any order in reverse and forward mode, also in `torch.func`."""
    if functorch_stack() is not None or forward_ad_level() >= 0:
        mask, scale = _as_mask(dropped, scale, blocks)
        return scaled(x, scale).masked_fill(mask, 0.0)
    if torch.is_grad_enabled() and x.requires_grad:
        y: Tensor = _ApplyMask.apply(x, dropped, scale, blocks)
        return y
    return apply_mask_no_grad(x, dropped, scale, blocks)


def _as_mask(dropped: Tensor, scale: Tensor, blocks: Blocks | None) -> tuple[Tensor, Tensor]:
    if blocks is None:
        return dropped, scale
    if dropped.dtype == torch.uint8:
        if scale.dtype == torch.int64:
            scale = ACCELERATORS[scale.device].scale_of_counters(scale, blocks)
        return blocks.mask(blocks.unpacked(dropped)), scale
    return blocks.mask(blocks.rows(dropped)), scale


class _ApplyMask(torch.autograd.Function):
    """Saves the seeds or the mask, and the scale."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dropped: Tensor, scale: Tensor, blocks: Blocks | None) -> Tensor:
        ctx.blocks = blocks
        ctx.save_for_backward(dropped, scale)
        return apply_mask_no_grad(x, dropped, scale, blocks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        dropped, scale = ctx.saved_tensors
        return apply_mask(grad, dropped, scale, ctx.blocks), None, None, None


def scaled(x: Tensor, scale: Tensor) -> Tensor:
    """Return `x * scale` in the dtype and memory format of `x`. In low precision, round the product only."""
    if scale.dim() == 0 and (x.dtype not in HALF or scale.device.type == "cpu"):
        return x * scale
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) * scale.to(wide)).to(x.dtype)


# --- dropout of whole slices, such as channels, samples and tokens, with one draw per slice


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
        return 1.0 / one_for_zero(1.0 - p)
    return 1.0 / (1.0 - p) if p < 1.0 else 1.0


def one_for_zero(x: Tensor) -> Tensor:
    """Replace 0 by 1 in a CPU tensor, none of whose numbers is negative.

    Without a bool tensor: for CUDA graphs, Inductor concatenates the CPU numbers of a graph, whatever their dtypes.
    """
    return x + (1.0 - x.sign())

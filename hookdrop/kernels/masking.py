"""Zeroing what a mask drops and scaling the rest: a linear map, which is its own derivative and transpose."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hookdrop.kernels import native
from hookdrop.kernels.blocks import Blocks
from hookdrop.utils.torch_internals import forward_ad_level, functorch_stack, has_storage, is_zero_tensor

_INT = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
HALF = (torch.float16, torch.bfloat16)


def mask(x: Tensor, dropped: Tensor, scale: Tensor, blocks: Blocks | None = None) -> Tensor:
    """`x * scale`, and 0 where `dropped`, even for NaN and infinity.

    Args:
        x: floating point.
        dropped: bool, broadcasting to `x`; or integers: the seeds of `blocks`.
        scale: 0-d, or one for each sample, broadcasting to `x`.
        blocks: the blocks to which the seeds belong.
    """
    y = native.cleared(x, dropped, scale) if blocks is None else native.masked(x, dropped, scale, blocks)
    if y is not None:
        return y
    if is_zero_tensor(x) or not has_storage(x):
        return scaled(x, scale).masked_fill(dropped if blocks is None else blocks.mask(blocks.rows(dropped)), 0.0)
    y = scaled(x, scale)
    return _clear_(y, dropped) if blocks is None else _zero_(y, dropped, blocks)


def masked(x: Tensor, dropped: Tensor, scale: Tensor, blocks: Blocks | None = None) -> Tensor:
    """`mask`, differentiable any number of times in both directions, and with a rule for `torch.func.vmap`."""
    if functorch_stack() is not None or forward_ad_level() >= 0:
        return _Transformed.apply(x, dropped, scale, blocks)  # type: ignore[no-any-return]
    if torch.is_grad_enabled() and x.requires_grad:
        return _Masked.apply(x, dropped, scale, blocks)  # type: ignore[no-any-return]
    return mask(x, dropped, scale, blocks)


class _Masked(torch.autograd.Function):
    """It saves the seeds or the bool mask, and the scale."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dropped: Tensor, scale: Tensor, blocks: Blocks | None) -> Tensor:
        ctx.blocks = blocks
        ctx.save_for_backward(dropped, scale)
        return mask(x, dropped, scale, blocks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        dropped, scale = ctx.saved_tensors
        return masked(grad, dropped, scale, ctx.blocks), None, None, None


class _Transformed(torch.autograd.Function):
    """`_Masked` for `torch.func` and forward-mode derivatives: a call takes four times as long."""

    @staticmethod
    def forward(x: Tensor, dropped: Tensor, scale: Tensor, blocks: Blocks | None) -> Tensor:
        return mask(x, dropped, scale, blocks)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, dropped, scale, ctx.blocks = inputs
        ctx.save_for_backward(dropped, scale)
        ctx.save_for_forward(dropped, scale)

    backward = _Masked.backward

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        dropped, scale = ctx.saved_tensors
        return masked(tangent, dropped, scale, ctx.blocks)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], x: Tensor, dropped: Tensor, scale: Tensor, blocks: Blocks | None
    ) -> tuple[Tensor, int]:
        if blocks is not None:
            assert in_dims[1] is None, "all slices share seeds; each slice has a mask otherwise"
            dropped = blocks.mask(blocks.rows(dropped))
        x = slices_in_front(x, in_dims[0], info.batch_size)
        return masked(x, _in_front(dropped, in_dims[1]), _in_front(scale, in_dims[2])), 0


def slices_in_front(x: Tensor, axis: int | None, size: int) -> Tensor:
    """`x` with the `size` slices of a `vmap` along axis 0; `axis` is None if they share `x`."""
    return x.expand(size, *x.shape) if axis is None else x.movedim(axis, 0)


def _in_front(value: Tensor, axis: int | None) -> Tensor:
    """`value` with the slices along axis 0, of length 1 if they share it; a 0-d tensor stays as it is."""
    if axis is not None:
        return value.movedim(axis, 0)
    return value.unsqueeze(0) if value.dim() else value


def _zero_(y: Tensor, seeds: Tensor, blocks: Blocks) -> Tensor:
    if native.zero_(y, seeds, blocks):
        return y
    if blocks.channels == y.shape[blocks.channel]:
        return blocks.zero_(y, seeds)
    return _clear_(y, blocks.mask(blocks.rows(seeds)))


def _clear_(y: Tensor, dropped: Tensor) -> Tensor:
    # NaN and infinity times 0 are NaN: clear all bits instead.
    bits = _INT[y.element_size()]
    y.view(bits).bitwise_and_(dropped.view(torch.int8).sub(1).to(bits))
    return y


def scaled(x: Tensor, scale: Tensor) -> Tensor:
    """`x * scale` in the dtype and the memory format of `x`; in low precision it rounds only the product."""
    if scale.dim() == 0 and (x.dtype not in HALF or scale.device.type == "cpu"):
        return x * scale
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) * scale.to(wide)).to(x.dtype)

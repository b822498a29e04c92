"""Zeroing what a mask drops and scaling the rest: one linear map, its own derivative and its own transpose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hookdrop.kernels import native
from hookdrop.kernels.blocks import Blocks
from hookdrop.utils.torch_internals import forward_ad_level, functorch_stack, has_storage, is_zero_tensor

_INT = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
HALF = (torch.float16, torch.bfloat16)


def mask(x: Tensor, dropped: Tensor, scale: Tensor, blocks: Blocks | None = None) -> Tensor:
    """`x * scale`, and 0 where `dropped`, whatever was there.

    Args:
        x: floating point.
        dropped: bool, broadcasting to `x`; or whole numbers: the seeds of `blocks`.
        scale: 0-d, or one for each sample, broadcasting to `x`.
        blocks: what the seeds are the seeds of.
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
    """Remembers the seeds, or the bool mask, and the scale."""

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
    """The same for `torch.func` and forward-mode derivatives, at four times the time that a call takes."""

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
            assert in_dims[1] is None, "seeds are drawn for no slice or for all: for slices there are masks"
            dropped = blocks.mask(blocks.rows(dropped))
        return masked(*slices_in_front(info.batch_size, in_dims[:3], x, dropped, scale)), 0


def slices_in_front(
    size: int, axes: Sequence[int | None], x: Tensor, dropped: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors of `size` slices, so that they broadcast; `axes` says where the slices of each are."""
    x = x.expand(size, *x.shape) if axes[0] is None else x.movedim(axes[0], 0)
    return x, _in_front(dropped, axes[1]), _in_front(scale, axes[2])


def _in_front(value: Tensor, axis: int | None) -> Tensor:
    """With the slices' axis in front, of length 1 where all slices have the same; one number stays one."""
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
    # A multiplication by 0 would keep NaN and Inf; all bits are cleared instead.
    bits = _INT[y.element_size()]
    y.view(bits).bitwise_and_(dropped.view(torch.int8).sub(1).to(bits))
    return y


def scaled(x: Tensor, scale: Tensor) -> Tensor:
    """`x * scale` in the dtype and the memory format of `x`; in low precision only the product is rounded."""
    if scale.dim() == 0 and (x.dtype not in HALF or scale.device.type == "cpu"):
        return x * scale
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) * scale.to(wide)).to(x.dtype)

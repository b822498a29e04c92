"""DropBlock in compiled code: two operations that the compiler takes as they are, with the rate as a tensor.

A Python float would be compiled in, or dropped at another rate without a word. The tensor is read inside of the
operation, on the CPU, so that one graph serves all rates.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hookdrop.arguments import rate
from hookdrop.ops.bernoulli import finest
from hookdrop.ops.blocks import Blocks
from hookdrop.ops.drawing import Seeded, refuse_by_accident, unfolded
from hookdrop.ops.gamma import gamma_for
from hookdrop.ops.masking import mask, scaled, slices_in_front

# It is random, and must not be run again for the backward pass; a captured CUDA graph would keep the first rate.
_TAGS = [getattr(torch.Tag, tag) for tag in ("nondeterministic_seeded", "cudagraph_unsafe") if hasattr(torch.Tag, tag)]


def drop_block(
    x: Tensor, p: Tensor, edges: tuple[int, ...], channel: int, per_channel: bool, gamma: str, normalize: str | None
) -> Tensor:
    """`hookdrop.dropblock.drop_block` with `p` as a 0-d tensor; the arguments are checked."""
    kind = list(edges), channel, per_channel
    y: Tensor = _mask(x, *_draw(x.detach(), p, *kind, gamma, normalize, 0), *kind)
    return y


@torch.library.custom_op("hookdrop::draw_blocks", mutates_args=(), tags=_TAGS)
def _draw(
    x: Tensor,
    p: Tensor,
    edges: list[int],
    channel: int,
    per_channel: bool,
    gamma: str,
    normalize: str | None,
    slices: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """`(seeds, dropped, scale)`: what is dropped is in the seeds or in the bool mask, and the other is empty."""
    blocks = _blocks(x.shape, edges, channel, per_channel)
    value = rate(p, "p", "DropBlock")
    seed_rate = gamma_for(blocks.sizes, blocks.blocks, value, gamma)
    found, scale = Seeded(blocks, seed_rate, value, normalize, slices).now(x)
    if found.dtype == torch.bool:
        return x.new_empty(0, dtype=blocks.index), found.contiguous(), scale
    return found, x.new_empty(_mask_shape(x, blocks, 0), dtype=torch.bool), scale


@_draw.register_fake
def _draw_fake(
    x: Tensor,
    p: Tensor,
    edges: list[int],
    channel: int,
    per_channel: bool,
    gamma: str,
    normalize: str | None,
    slices: int,
) -> tuple[Tensor, Tensor, Tensor]:
    blocks = _blocks(x.shape, edges, channel, per_channel)
    context = torch.library.get_ctx()
    seeds = x.new_empty(0 if slices else context.new_dynamic_size(), dtype=blocks.index)
    samples = x.shape[0] if slices else context.new_dynamic_size()
    dropped = x.new_empty(_mask_shape(x, blocks, samples), dtype=torch.bool)
    if normalize not in ("batch", "sample"):
        return seeds, dropped, torch.empty((), dtype=torch.float64, device="cpu")
    shape = () if normalize == "batch" and not slices else (x.shape[0], *[1] * (x.dim() - 1))
    return seeds, dropped, x.new_empty(shape, dtype=finest(x.device))


@_draw.register_vmap
def _draw_slices(info: Any, in_dims: tuple[int | None, ...], x: Tensor, p: Tensor, *settings: Any) -> Any:
    if in_dims[1] is not None:
        raise RuntimeError("vmap over the drop rate: DropBlock has one rate for all slices.")
    refuse_by_accident(info.randomness)
    x = x.movedim(in_dims[0] or 0, 0)
    if info.randomness == "same":
        return _draw(x[0], p, *settings), (None, None, None)
    count, slices = x.shape[0], max(settings[-1], 1)
    seeds, dropped, scale = _draw(x.flatten(0, 1), p, *settings[:-1], slices * count)
    return (seeds, unfolded(dropped, count), unfolded(scale, count)), (None, 0, 0 if scale.dim() else None)


@torch.library.custom_op("hookdrop::mask_blocks", mutates_args=())
def _mask(
    x: Tensor, seeds: Tensor, dropped: Tensor, scale: Tensor, edges: list[int], channel: int, per_channel: bool
) -> Tensor:
    sown = None if dropped.numel() else _blocks(x.shape, edges, channel, per_channel)
    y = mask(x, dropped if sown is None else seeds, scale, sown)
    promised = torch.empty_like(x)
    return y if y.stride() == promised.stride() else promised.copy_(y)


@_mask.register_fake
def _mask_fake(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


@_mask.register_vmap
def _mask_slices(
    info: Any, in_dims: tuple[int | None, ...], x: Tensor, seeds: Tensor, dropped: Tensor, scale: Tensor, *settings: Any
) -> tuple[Tensor, int]:
    at, _, at_dropped, at_scale, *_ = in_dims
    if at_dropped is not None:
        x, dropped, scale = slices_in_front(info.batch_size, (at, at_dropped, at_scale), x, dropped, scale)
        return scaled(x, scale).masked_fill(dropped, 0.0), 0
    # One mask for all slices, and whether it is in the seeds is known only when it is drawn.
    each = [x] * info.batch_size if at is None else x.unbind(at)
    return torch.stack([_mask(one, seeds, dropped, scale, *settings) for one in each]), 0


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, seeds, dropped, scale, *ctx.settings = inputs
    ctx.save_for_backward(seeds, dropped, scale)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (_mask(grad, *ctx.saved_tensors, *ctx.settings), *[None] * (3 + len(ctx.settings)))


_mask.register_autograd(_backward, setup_context=_remember)


def _blocks(shape: torch.Size, edges: list[int], channel: int, per_channel: bool) -> Blocks:
    sizes = tuple(size for axis, size in enumerate(shape) if axis not in (0, channel))
    return Blocks(shape[0], shape[channel] if per_channel else 1, sizes, tuple(edges), channel)


def _mask_shape(x: Tensor, blocks: Blocks, samples: Any) -> list[Any]:
    shape = list(x.shape)
    shape[0], shape[blocks.channel] = samples, blocks.channels
    return shape

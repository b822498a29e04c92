"""Drawing in compiled code: custom operators that are opaque to the compiler and take the rate as a tensor.

The compiler would treat a Python float as a constant. The operators read the rate, a CPU tensor, at run time, so one
graph serves all rates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hookdrop.kernels import triton_dropblock
from hookdrop.kernels.blocks import Blocks, gamma_for
from hookdrop.kernels.drawing import BlockDrawing, ElementDrawing, check_vmap_randomness, split_slices
from hookdrop.kernels.masking import apply_mask_no_grad, slices_to_front
from hookdrop.kernels.random_numbers import most_precise_dtype, rand_like, replayed
from hookdrop.utils.torch_internals import disable_dynamo
from hookdrop.utils.validation import rate


def drop_block(
    x: Tensor, p: Tensor, edges: tuple[int, ...], channel: int, per_channel: bool, gamma: str, normalize: str | None
) -> Tensor:
    """`hookdrop.functional.drop_block` with a 0-d tensor `p` and validated arguments."""
    kind = list(edges), channel, per_channel
    y: Tensor = _MASK(x, *replayed(_DRAW, x.detach(), p, *kind, gamma, normalize, 0), *kind)
    return y


def draw_elements(x: Tensor, p: Tensor) -> Tensor:
    """Return a bool tensor like `x` whose elements are True with probability `p`, a 0-d tensor."""
    # Compiled code fuses random numbers into the kernels that use them, but draws them slowly on the CPU.
    dropped: Tensor = replayed(_ELEMENTS, x.detach(), p) if x.device.type == "cpu" else rand_like(x, torch.float32) < p
    return dropped


def _elements(x: Tensor, p: Tensor) -> Tensor:
    return ElementDrawing(rate(p, "p", "Dropout")).draw(x)[0]


def _elements_vmap(info: Any, in_dims: tuple[int | None, ...], x: Tensor, p: Tensor) -> tuple[Tensor, int | None]:
    x = _slices_along_axis_0(info, in_dims, x)
    return (_ELEMENTS(x[0], p), None) if info.randomness == "same" else (_ELEMENTS(x, p), 0)


def _slices_along_axis_0(info: Any, in_dims: tuple[int | None, ...], x: Tensor) -> Tensor:
    """Move the slices of a `vmap` to axis 0 of `x`."""
    if in_dims[1] is not None:
        raise RuntimeError("cannot vmap over the drop rate: all slices share one rate.")
    check_vmap_randomness(info.randomness)
    return x.movedim(in_dims[0] or 0, 0)


def _draw(x: Tensor, p: Tensor, *settings: Any) -> tuple[Tensor, Tensor, Tensor]:
    """`(record, seeds, scale)`: what to drop as bytes, the number of seeds they hold or -1 for one bit per element.

    From the GPU kernels, `scale` are the counters of `triton_dropblock.draw`, unless it is constant.
    """
    *kind, gamma, normalize, slices = settings
    blocks, value = _blocks(x.shape, *kind), rate(p, "p", "DropBlock")
    seed_rate = gamma_for(blocks.sizes, blocks.blocks, value, gamma)
    found, scale = BlockDrawing(blocks, seed_rate, value, normalize, slices, rows=True)(x)
    record, count = _to_record(found, blocks)
    return record, torch.tensor(count, device="cpu"), scale


def _draw_fake(x: Tensor, p: Tensor, *settings: Any) -> tuple[Tensor, Tensor, Tensor]:
    *kind, _, normalize, slices = settings
    blocks = _blocks(x.shape, *kind)
    record = x.new_empty(blocks.packed_size, dtype=torch.uint8)
    seeds = torch.empty((), dtype=torch.int64, device="cpu")
    if normalize not in ("batch", "sample"):
        return record, seeds, torch.empty((), dtype=torch.float64, device="cpu")
    if not slices and triton_dropblock.can_draw(blocks, x.device):
        return record, seeds, x.new_empty(triton_dropblock.counters_size(blocks, normalize), dtype=torch.int64)
    shape = () if normalize == "batch" and not slices else (x.shape[0], *[1] * (x.dim() - 1))
    return record, seeds, x.new_empty(shape, dtype=most_precise_dtype(x.device))


def _draw_vmap(info: Any, in_dims: tuple[int | None, ...], x: Tensor, p: Tensor, *settings: Any) -> Any:
    x = _slices_along_axis_0(info, in_dims, x)
    if info.randomness == "same":
        return _DRAW(x[0], p, *settings), (None, None, None)
    count, slices = x.shape[0], max(settings[-1], 1)
    record, seeds, scale = _DRAW(x.flatten(0, 1), p, *settings[:-1], slices * count)
    return (split_slices(record, count), seeds, split_slices(scale, count)), (0, None, 0 if scale.dim() else None)


def _mask(x: Tensor, record: Tensor, seeds: Tensor, scale: Tensor, *kind: Any) -> Tensor:
    blocks, count = _blocks(x.shape, *kind), int(seeds)
    if count >= 0:
        record = record.view(-1)[: count * blocks.index_dtype.itemsize].view(blocks.index_dtype)
    y = apply_mask_no_grad(x, record, scale, blocks)
    expected = _mask_fake(x)
    return y if y.stride() == expected.stride() else expected.copy_(y)


def _mask_fake(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


def _mask_vmap(
    info: Any, in_dims: tuple[int | None, ...], x: Tensor, record: Tensor, seeds: Tensor, scale: Tensor, *kind: Any
) -> tuple[Tensor, int]:
    size = info.batch_size
    x = slices_to_front(x, in_dims[0], size)
    if in_dims[1] is None:
        # All slices share one mask.
        return torch.stack([_MASK(one, record, seeds, scale, *kind) for one in x]), 0
    record = record.movedim(in_dims[1], 0).flatten(0, 1)
    if in_dims[3] is not None:
        scale = scale.movedim(in_dims[3], 0)
    scale = scale.flatten(0, 1) if scale.dim() else scale
    return _MASK(x.flatten(0, 1), record, seeds, scale, *kind).unflatten(0, (size, -1)), 0


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, record, seeds, scale, *ctx.settings = inputs
    ctx.save_for_backward(record, seeds, scale)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (_MASK(grad, *ctx.saved_tensors, *ctx.settings), *[None] * (3 + len(ctx.settings)))


def _to_record(found: Tensor, blocks: Blocks) -> tuple[Tensor, int]:
    """Convert seeds or rows to uint8 of shape `packed_size`, with the number of seeds, or -1 for rows."""
    if found.dtype == torch.uint8:
        return found if found.shape == blocks.packed_size else blocks.packed(found), -1
    record = torch.empty(blocks.packed_size, dtype=torch.uint8, device=found.device)
    if found.nbytes > record.numel():
        return blocks.packed(blocks.rows(found)), -1
    record.view(-1)[: found.nbytes] = found.view(torch.uint8)
    return record, found.numel()


def _blocks(shape: torch.Size, edges: list[int], channel: int, per_channel: bool) -> Blocks:
    sizes = tuple(size for axis, size in enumerate(shape) if axis != 0 and axis != channel)
    return Blocks(shape[0], shape[channel] if per_channel else 1, sizes, tuple(edges), channel)


def _operator(schema: str, function: Callable[..., Any], fake: Callable[..., Any], vmap: Any, tags: Any = ()) -> Any:
    """Register `function` as an operator with its meta implementation `fake` and its `vmap` rule."""
    name = schema.partition("(")[0]
    qualified = f"hookdrop::{name}"
    torch.library.define(qualified, schema.removeprefix(name), tags=tags)
    # The compiler must not trace into the operator.
    torch.library.impl(qualified, "default")(disable_dynamo(function))
    torch.library.register_fake(qualified)(fake)
    torch.library.register_vmap(qualified, vmap)
    return getattr(torch.ops.hookdrop, name).default


# Recomputation in backward must not draw again, and a captured CUDA graph would reuse the first rate.
_RANDOM = [
    getattr(torch.Tag, tag) for tag in ("nondeterministic_seeded", "cudagraph_unsafe") if hasattr(torch.Tag, tag)
]

_KIND = "SymInt[] edges, SymInt channel, bool per_channel"
_DRAWN = f"Tensor x, Tensor p, {_KIND}, str gamma, str? normalize, SymInt slices"
_ELEMENTS = _operator(
    "draw_elements(Tensor x, Tensor p) -> Tensor",
    _elements,
    lambda x, p: torch.empty_like(x, dtype=torch.bool),
    _elements_vmap,
    _RANDOM,
)
_DRAW = _operator(f"draw_blocks({_DRAWN}) -> (Tensor, Tensor, Tensor)", _draw, _draw_fake, _draw_vmap, _RANDOM)
_MASKED = f"Tensor x, Tensor record, Tensor seeds, Tensor scale, {_KIND}"
_MASK = _operator(f"mask_blocks({_MASKED}) -> Tensor", _mask, _mask_fake, _mask_vmap)
torch.library.register_autograd("hookdrop::mask_blocks", _backward, setup_context=_setup_context)

"""Drawing in compiled code: operations that the compiler takes as they are, with the rate as a tensor.

A Python float would be compiled in, or dropped at another rate without a word. The tensor is read inside of the
operation, on the CPU, so that one graph serves all rates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hookdrop.kernels.bernoulli import finest
from hookdrop.kernels.blocks import Blocks
from hookdrop.kernels.drawing import Elements, Seeded, refuse_by_accident, unfolded
from hookdrop.kernels.masking import mask
from hookdrop.kernels.seed_rate import gamma_for
from hookdrop.utils.torch_internals import disable_dynamo
from hookdrop.utils.validation import rate


def drop_block(
    x: Tensor, p: Tensor, edges: tuple[int, ...], channel: int, per_channel: bool, gamma: str, normalize: str | None
) -> Tensor:
    """`hookdrop.functional.drop_block` with `p` as a 0-d tensor; the arguments are checked."""
    kind = list(edges), channel, per_channel
    y: Tensor = _MASK(x, *_DRAW(x.detach(), p, *kind, gamma, normalize, 0), *kind)
    return y


def draw_elements(x: Tensor, p: Tensor) -> Tensor:
    """A bool tensor like `x`: each element is True with probability `p`, a 0-d tensor."""
    if x.device.type != "cpu":
        return torch.rand_like(x, dtype=torch.float32) < p
    # On a CPU the compiler's random numbers take longer than all else; elsewhere they are drawn where they are used.
    dropped: Tensor = _ELEMENTS(x.detach(), p)
    return dropped


def _elements(x: Tensor, p: Tensor) -> Tensor:
    return Elements(rate(p, "p", "Dropout")).now(x)[0]


def _elements_fake(x: Tensor, p: Tensor) -> Tensor:
    return torch.empty_like(x, dtype=torch.bool)


def _elements_of_slices(info: Any, in_dims: tuple[int | None, ...], x: Tensor, p: Tensor) -> tuple[Tensor, int | None]:
    _one_rate(in_dims[1])
    refuse_by_accident(info.randomness)
    x = x.movedim(in_dims[0] or 0, 0)
    return (_ELEMENTS(x[0], p), None) if info.randomness == "same" else (_ELEMENTS(x, p), 0)


def _one_rate(in_dim: int | None) -> None:
    if in_dim is not None:
        raise RuntimeError("vmap over the drop rate: all slices are dropped at one rate.")


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
    """`(record, seeds, scale)`: what is dropped, as bytes; how many seeds they hold, or -1 if a bit an element."""
    blocks = _blocks(x.shape, edges, channel, per_channel)
    value = rate(p, "p", "DropBlock")
    seed_rate = gamma_for(blocks.sizes, blocks.blocks, value, gamma)
    found, scale = Seeded(blocks, seed_rate, value, normalize, slices, rows=True).now(x)
    record, count = _recorded(found, blocks)
    return record, torch.tensor(count, device="cpu"), scale


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
    record = x.new_empty(_blocks(x.shape, edges, channel, per_channel).packed_size, dtype=torch.uint8)
    seeds = torch.empty((), dtype=torch.int64, device="cpu")
    if normalize not in ("batch", "sample"):
        return record, seeds, torch.empty((), dtype=torch.float64, device="cpu")
    shape = () if normalize == "batch" and not slices else (x.shape[0], *[1] * (x.dim() - 1))
    return record, seeds, x.new_empty(shape, dtype=finest(x.device))


def _draw_slices(info: Any, in_dims: tuple[int | None, ...], x: Tensor, p: Tensor, *settings: Any) -> Any:
    _one_rate(in_dims[1])
    refuse_by_accident(info.randomness)
    x = x.movedim(in_dims[0] or 0, 0)
    if info.randomness == "same":
        return _DRAW(x[0], p, *settings), (None, None, None)
    count, slices = x.shape[0], max(settings[-1], 1)
    record, seeds, scale = _DRAW(x.flatten(0, 1), p, *settings[:-1], slices * count)
    return (unfolded(record, count), seeds, unfolded(scale, count)), (0, None, 0 if scale.dim() else None)


def _mask(
    x: Tensor, record: Tensor, seeds: Tensor, scale: Tensor, edges: list[int], channel: int, per_channel: bool
) -> Tensor:
    blocks, count = _blocks(x.shape, edges, channel, per_channel), int(seeds)
    if count < 0:
        y = mask(x, blocks.mask(blocks.unpacked(record)), scale)
    else:
        y = mask(x, record.view(-1)[: count * blocks.index.itemsize].view(blocks.index), scale, blocks)
    promised = torch.empty_like(x)
    return y if y.stride() == promised.stride() else promised.copy_(y)


def _mask_fake(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


def _mask_slices(
    info: Any, in_dims: tuple[int | None, ...], x: Tensor, record: Tensor, seeds: Tensor, scale: Tensor, *settings: Any
) -> tuple[Tensor, int]:
    size = info.batch_size
    x, record, scale = (
        value if dim is None else value.movedim(dim, 0)
        for value, dim in zip((x, record, scale), (in_dims[0], in_dims[1], in_dims[3]), strict=True)
    )
    if in_dims[0] is None:
        x = x.expand(size, *x.shape)
    if in_dims[1] is None:
        # One mask for all slices.
        return torch.stack([_MASK(one, record, seeds, scale, *settings) for one in x]), 0
    scale = scale.flatten(0, 1) if scale.dim() else scale
    return _MASK(x.flatten(0, 1), record.flatten(0, 1), seeds, scale, *settings).unflatten(0, (size, -1)), 0


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, record, seeds, scale, *ctx.settings = inputs
    ctx.save_for_backward(record, seeds, scale)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (_MASK(grad, *ctx.saved_tensors, *ctx.settings), *[None] * (3 + len(ctx.settings)))


def _recorded(found: Tensor, blocks: Blocks) -> tuple[Tensor, int]:
    """Seeds or rows, as uint8 of the shape that is promised before it is known which, and how many seeds."""
    if found.dtype == torch.uint8:
        return blocks.packed(found), -1
    record = torch.empty(blocks.packed_size, dtype=torch.uint8, device=found.device)
    if found.nbytes > record.numel():
        return blocks.packed(blocks.rows(found)), -1
    record.view(-1)[: found.nbytes] = found.view(torch.uint8)
    return record, found.numel()


def _blocks(shape: torch.Size, edges: list[int], channel: int, per_channel: bool) -> Blocks:
    sizes = tuple(size for axis, size in enumerate(shape) if axis != 0 and axis != channel)
    return Blocks(shape[0], shape[channel] if per_channel else 1, sizes, tuple(edges), channel)


def _operation(
    schema: str, function: Callable[..., Any], fake: Callable[..., Any], each: Any, tags: Sequence[Any]
) -> Any:
    """`function` as an operation that the compiler takes as it is, given its shapes and its rule for `vmap`."""
    name = schema.partition("(")[0]
    qualified = f"hookdrop::{name}"
    torch.library.define(qualified, schema.removeprefix(name), tags=tags)
    # What runs in it is not to be traced; `torch.compiler.disable` says so too, but loads the compiler.
    torch.library.impl(qualified, "default")(disable_dynamo(function))
    torch.library.register_fake(qualified)(fake)
    torch.library.register_vmap(qualified, each)
    return getattr(torch.ops.hookdrop, name).default


# It is random, and must not be run again for the backward pass; a captured CUDA graph would keep the first rate.
_RANDOM = [
    getattr(torch.Tag, tag) for tag in ("nondeterministic_seeded", "cudagraph_unsafe") if hasattr(torch.Tag, tag)
]

_KIND = "SymInt[] edges, SymInt channel, bool per_channel"
_ELEMENTS = _operation(
    "draw_elements(Tensor x, Tensor p) -> Tensor", _elements, _elements_fake, _elements_of_slices, _RANDOM
)
_DRAW = _operation(
    f"draw_blocks(Tensor x, Tensor p, {_KIND}, str gamma, str? normalize, SymInt slices) -> (Tensor, Tensor, Tensor)",
    _draw,
    _draw_fake,
    _draw_slices,
    _RANDOM,
)
_MASK = _operation(
    f"mask_blocks(Tensor x, Tensor record, Tensor seeds, Tensor scale, {_KIND}) -> Tensor",
    _mask,
    _mask_fake,
    _mask_slices,
    (),
)
torch.library.register_autograd("hookdrop::mask_blocks", _backward, setup_context=_remember)

"""Drawing in compiled code: custom operators that are opaque to the compiler and take the rate as a tensor.

The compiler would treat a Python float as a constant. The operators read the rate, a CPU tensor, at run time, so one
graph serves all rates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hookdrop.core.arguments import as_rate_tensor, rate
from hookdrop.core.torch_internals import vmap_randomness
from hookdrop.kernels import drawing
from hookdrop.kernels.accelerators import ACCELERATORS
from hookdrop.kernels.blocks import Blocks, gamma_for
from hookdrop.kernels.masking import apply_mask_no_grad
from hookdrop.kernels.random_numbers import most_precise_dtype, operator, rand_like, replayed


def drop_block(
    x: Tensor, p: Tensor, edges: tuple[int, ...], channel: int, per_channel: bool, gamma: str, normalize: str | None
) -> Tensor:
    """`hookdrop.functional.drop_block` with a 0-d tensor `p` and validated arguments."""
    kind = list(edges), channel, per_channel
    if vmap_randomness():
        sizes = [size for axis, size in enumerate(x.shape) if axis not in (0, channel)]
        return drawing.drop_blocks_in_vmap(x, p, _SEED_RATE(p, sizes, kind[0], gamma), *kind, normalize)
    return _MASK(x, *replayed(_DRAW, x.detach(), p, *kind, gamma, normalize), *kind)


def draw_elements(x: Tensor, p: Tensor) -> Tensor:
    """Return a bool tensor like `x` whose elements are True with probability `p`, a 0-d tensor."""
    if vmap_randomness() or x.device.type != "cpu":
        return rand_like(x, torch.float32) < p
    # Compiled code fuses random numbers into the kernels that use them, but draws them slowly on the CPU.
    return replayed(_ELEMENTS, x.detach(), p)


def _draw(x: Tensor, p: Tensor, *settings: Any) -> tuple[Tensor, Tensor, Tensor]:
    """`(record, seeds, scale)`: what to drop as bytes, the number of seeds they hold or -1 for one bit per element.

    `scale` may be the counters of `Accelerator.draw`.
    """
    *kind, gamma, normalize = settings
    blocks, value = _blocks(x.shape, *kind), rate(p, "p", "DropBlock")
    seed_rate = gamma_for(blocks.sizes, blocks.blocks, value, gamma)
    found, scale = drawing.draw_blocks(x, blocks, seed_rate, value, normalize, rows=True)
    record, count = _to_record(found, blocks)
    return record, torch.tensor(count, device="cpu"), scale


def _draw_fake(x: Tensor, p: Tensor, *settings: Any) -> tuple[Tensor, Tensor, Tensor]:
    *kind, _, normalize = settings
    blocks = _blocks(x.shape, *kind)
    record = x.new_empty(blocks.packed_size, dtype=torch.uint8)
    seeds = torch.empty((), dtype=torch.int64, device="cpu")
    if normalize not in drawing.COUNTED:
        return record, seeds, torch.empty((), dtype=torch.float64, device="cpu")
    accelerator = ACCELERATORS[x.device]
    if accelerator.can_draw(blocks, x.device):
        return record, seeds, x.new_empty(accelerator.counters_size(blocks, normalize), dtype=torch.int64)
    shape = () if normalize == "batch" else (x.shape[0], *[1] * (x.dim() - 1))
    return record, seeds, x.new_empty(shape, dtype=most_precise_dtype(x.device))


def _mask(x: Tensor, record: Tensor, seeds: Tensor, scale: Tensor, *kind: Any) -> Tensor:
    blocks, count = _blocks(x.shape, *kind), int(seeds)
    if count >= 0:
        record = record.view(-1)[: count * blocks.index_dtype.itemsize].view(blocks.index_dtype)
    y = apply_mask_no_grad(x, record, scale, blocks)
    expected = torch.empty_like(x)
    return y if y.stride() == expected.stride() else expected.copy_(y)


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


# Recomputation in backward must not draw again, and a captured CUDA graph would reuse the first rate.
_RANDOM = [
    getattr(torch.Tag, tag) for tag in ("nondeterministic_seeded", "cudagraph_unsafe") if hasattr(torch.Tag, tag)
]

_KIND = "SymInt[] edges, SymInt channel, bool per_channel"
_ELEMENTS: Callable[..., Tensor] = operator(
    "draw_elements(Tensor x, Tensor p) -> Tensor",
    lambda x, p: drawing.draw_elements(x, rate(p, "p", "Dropout"))[0],
    lambda x, p: torch.empty_like(x, dtype=torch.bool),
    *_RANDOM,
)
_DRAWN = f"Tensor x, Tensor p, {_KIND}, str gamma, str? normalize"
_DRAW = operator(f"draw_blocks({_DRAWN}) -> (Tensor, Tensor, Tensor)", _draw, _draw_fake, *_RANDOM)
_MASKED = f"Tensor x, Tensor record, Tensor seeds, Tensor scale, {_KIND}"
_MASK: Callable[..., Tensor] = operator(f"mask_blocks({_MASKED}) -> Tensor", _mask, lambda x, *_: torch.empty_like(x))
torch.library.register_autograd("hookdrop::mask_blocks", _backward, setup_context=_setup_context)
_SEED_RATE = operator(
    "seed_rate(Tensor p, SymInt[] sizes, SymInt[] edges, str gamma) -> Tensor",
    lambda p, sizes, edges, gamma: as_rate_tensor(
        gamma_for(tuple(sizes), tuple(edges), rate(p, "p", "DropBlock"), gamma)
    ),
    lambda p, *_: torch.empty_like(p),
)

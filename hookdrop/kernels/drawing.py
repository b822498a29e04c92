"""Drawing masks, and the scale that keeps the mean."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from hookdrop.core import torch_internals as internals
from hookdrop.core.arguments import as_rate_tensor
from hookdrop.kernels.accelerators import ACCELERATORS
from hookdrop.kernels.blocks import Blocks
from hookdrop.kernels.masking import keep_scale, scaled
from hookdrop.kernels.random_numbers import kept_scale, most_precise_dtype, rand, successes, trials

COUNTED = ("batch", "sample")
NORMALIZE = (*COUNTED, "expected", None)


def draw_elements(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Drop each element with probability `p`: `(dropped, scale)` for `masking.apply_mask`."""
    like = torch.empty_like(x, dtype=torch.bool)
    with internals.without_functorch():
        dropped = trials(x.numel(), p, x.device, static=must_avoid_sync(x)).view(torch.bool)
    return dropped.as_strided(like.shape, like.stride()), as_rate_tensor(float(keep_scale(p)))


def draw_blocks(
    x: Tensor, blocks: Blocks, seed_rate: float, p: float, normalize: str | None, *, rows: bool = False
) -> tuple[Tensor, Tensor]:
    """Drop blocks, whose seeds have probability `seed_rate`: `(dropped, scale)` for `masking.apply_mask`.

    With `rows`, masks are in the format of `Blocks.rows`.
    """
    static = must_avoid_sync(x)
    if static and type(x) in internals.PLAIN_TYPES and internals.functorch_stack() is None:
        accelerator = ACCELERATORS[x.device]
        if accelerator.can_draw(blocks, x.device):
            dropped, counters = accelerator.draw(blocks, seed_rate, normalize, x.device)
            return dropped, counters if normalize in COUNTED else _constant_scale(p, normalize)
    if not static and _sparse(blocks, seed_rate):
        dropped = successes(blocks.places, seed_rate, x.device, blocks.index_dtype)
    else:
        dropped = blocks.dilated(trials(blocks.places, seed_rate, x.device, static=static))
    scale = _scale(dropped, blocks, p, normalize, x.dim())
    return blocks.mask(dropped) if dropped.dtype == torch.uint8 and not rows else dropped, scale


def _scale(dropped: Tensor, blocks: Blocks, p: float, normalize: str | None, rank: int) -> Tensor:
    """The scale that keeps the mean: count / kept count of the batch or of each sample, or a constant."""
    if normalize is None or normalize == "expected":
        return _constant_scale(p, normalize)
    rows = dropped.dtype == torch.uint8
    if not rows and (scale := ACCELERATORS[dropped.device].scale_of_seeds(dropped, blocks, normalize)) is not None:
        return scale
    lost = blocks.counts(dropped if rows else blocks.rows(dropped))
    if normalize == "sample":
        return kept_scale(blocks.elements_per_sample, lost, rank)
    return kept_scale(blocks.samples * blocks.elements_per_sample, lost.sum(), rank)


def _constant_scale(p: float, normalize: str | None) -> Tensor:
    return as_rate_tensor(float(keep_scale(p if normalize == "expected" else 0.0)))


def _sparse(blocks: Blocks, seed_rate: float) -> bool:
    """Whether drawing only the seeds is faster than one trial per position."""
    if seed_rate == 1.0:
        return False
    seeds = blocks.places * seed_rate
    elements = blocks.samples * blocks.elements_per_sample
    doublings = sum((block - 1).bit_length() for block in blocks.blocks)  # of `Blocks.dilated`
    dense = blocks.places * _TRIAL + elements * (_MASK + _DOUBLING * doublings)
    return seeds * (_SEED + _WRITE * math.prod(blocks.blocks)) < dense


# Nanoseconds on a CPU: draw and place a seed, write an element, do a trial, fill a mask element, dilate it once.
_SEED, _WRITE, _TRIAL, _MASK, _DOUBLING = 15.0, 0.4, 0.4, 0.3, 0.06


def must_avoid_sync(x: Tensor) -> bool:
    """Whether reading a value must be avoided: an accelerator would synchronize, and a traced tensor has no value.

    This must not depend on other dispatch modes, or a profiler would change the masks.
    """
    if not x.is_cpu or type(x) not in internals.PLAIN_TYPES:
        return True
    return internals.dispatch_modes() > 0 and internals.is_proxy_tracing()


def drop_blocks_in_vmap(
    x: Tensor, p: Tensor, seed_rate: Tensor, edges: list[int], channel: int, per_channel: bool, normalize: str | None
) -> Tensor:
    """DropBlock in operations that `vmap` transforms: max pooling grows seeds to blocks."""
    maps, *sizes = x.movedim(channel, 1).shape[1:]
    valid = [size - edge + 1 for size, edge in zip(sizes, edges, strict=True)]
    places = (x.shape[0], maps if per_channel else 1, *valid)
    seeds = (rand(places, most_precise_dtype(x.device), x.device) < seed_rate).float()
    pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[len(edges) - 1]
    dropped = pool(F.pad(seeds, [edge - 1 for edge in reversed(edges) for _ in range(2)]), edges, stride=1) != 0.0
    if normalize in COUNTED:
        # Not 0-d: PyTorch would round the scale to a low precision before multiplying.
        lost = dropped.view(1 if normalize == "batch" else x.shape[0], -1).sum(1)
        x = scaled(x, kept_scale(dropped.numel() // lost.numel(), lost, x.dim()))
    elif normalize == "expected":
        x = x * keep_scale(p)
    return x.masked_fill(dropped.movedim(1, channel), 0.0)

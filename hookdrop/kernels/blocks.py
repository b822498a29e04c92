"""Block geometry: where seeds may lie, and which and how many elements their blocks cover.

One implementation serves any number of spatial axes and any memory format: a block is a strided window into the memory
of a tensor, at the offset of its seed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from hookdrop.core.arguments import count
from hookdrop.core.errors import ShapeError
from hookdrop.core.torch_internals import PLAIN_TYPES, dispatch_modes, functorch_stack, is_tracing


@dataclass(frozen=True, eq=False)
class Blocks:
    """`samples` x `channels` masks of `sizes`. A seed is the first corner of a block.

    Seeds lie where a whole block fits and are numbered along (samples, channels, *valid), last axis fastest. The object
    is a cache key that hashes by identity: `blocks_of` returns one object for each geometry.
    """

    samples: int
    channels: int  # 1 if all channels share a mask
    sizes: tuple[int, ...]
    blocks: tuple[int, ...]
    channel: int = 1  # the channel axis of the tensors to mask

    @cached_property
    def valid(self) -> tuple[int, ...]:
        """The number of valid seed positions along each spatial axis."""
        return tuple(size - block + 1 for size, block in zip(self.sizes, self.blocks, strict=True))

    @cached_property
    def places(self) -> int:
        """The total number of valid seed positions."""
        return self.samples * self.channels * math.prod(self.valid)

    @cached_property
    def index_dtype(self) -> torch.dtype:
        """The smallest integer dtype that can number the seed positions."""
        return torch.int32 if self.places < 2**31 else torch.int64

    @cached_property
    def elements_per_sample(self) -> int:
        """The number of mask elements of one sample."""
        return self.channels * math.prod(self.sizes)

    def zero_(self, x: Tensor, seeds: Tensor) -> Tensor:
        """Zero the seeds' blocks in `x`, a dense tensor with its channels at axis `channel`."""
        return self._fill_(x, seeds, x.movedim(self.channel, 1).stride(), 0)

    def rows(self, seeds: Tensor) -> Tensor:
        """uint8 (samples, pitch): each row holds the masks of one sample, 1 inside blocks, padded with zeros."""
        rows = torch.zeros(self.samples, self._pitch, dtype=torch.uint8, device=seeds.device)
        return self._fill_(rows, seeds, (self._pitch, *contiguous_strides((self.channels, *self.sizes))), 1)

    def dilated(self, seeds: Tensor) -> Tensor:
        """`rows` from dense seeds: one uint8 per seed position, 1 for a seed."""
        rows = torch.zeros(self.samples, self._pitch, dtype=torch.uint8, device=seeds.device)
        corner = self._shaped(rows)
        for axis, valid in enumerate(self.valid, start=2):
            corner = corner.narrow(axis, 0, valid)
        corner.copy_(seeds.view(corner.shape))
        # A whole block fits at each seed, so shifting the memory never reaches the next line or map.
        flat = rows.view(-1)
        for stride, block in zip(contiguous_strides(self.sizes), self.blocks, strict=True):
            covered = 1
            while covered < block:
                step = min(covered, block - covered)
                shifted = flat[: -step * stride]
                flat = torch.cat([flat[: step * stride], flat[step * stride :] | shifted])
                covered += step
        return flat.view(rows.shape)

    def counts(self, rows: Tensor) -> Tensor:
        """int64 (samples,): the number of ones of each sample in `rows`."""
        # Add eight bytes at a time: the sum of up to 255 words does not overflow a byte.
        words = rows.view(torch.int64)
        chunk = _WORDS if words.shape[1] > 255 else words.shape[1]
        return words.view(self.samples, -1, chunk).sum(2).view(torch.uint8).sum(1)

    @property
    def packed_size(self) -> tuple[int, int]:
        """The shape of `packed`: one bit for each element, including the padding."""
        return self.samples, self._pitch // 8

    def packed(self, rows: Tensor) -> Tensor:
        """`rows` packed to eight elements per byte: uint8 of shape `packed_size`."""
        # The multiplication gathers the lowest bits of a word's eight bytes in its highest byte.
        return ((rows.view(torch.int64) * 0x0102040810204080) >> 56).to(torch.uint8)

    def unpacked(self, packed: Tensor) -> Tensor:
        """The inverse of `packed`."""
        # Copy the byte eight times, select a different bit in each copy, and move it to the lowest position.
        bits = (packed.long() * _EACH_BYTE) & _BIT_OF_EACH
        return (((bits + 0x7F * _EACH_BYTE) >> 7) & _EACH_BYTE).view(torch.uint8)

    def mask(self, rows: Tensor) -> Tensor:
        """`rows` as a bool mask with the axes of the tensor to mask; it has 1 channel if the channels share a mask."""
        return self._shaped(rows).view(torch.bool).movedim(1, self.channel)

    def _shaped(self, rows: Tensor) -> Tensor:
        return rows[:, : self.elements_per_sample].view(self.samples, self.channels, *self.sizes)

    @property
    def _pitch(self) -> int:
        # A multiple of 32, because the GPU kernels write the masks as 32-bit words.
        words = -(-self.elements_per_sample // 32) * 4
        return 8 * (words if words <= 255 else -(-words // _WORDS) * _WORDS)

    def _fill_(self, memory: Tensor, seeds: Tensor, strides: Sequence[int], value: int) -> Tensor:
        """Write `value` to the seeds' blocks. `strides` are the strides of (samples, channels, *sizes)."""
        offsets = self._offsets(seeds, strides)
        rewritten = torch.compiler.is_compiling() or dispatch_modes() > 0 or functorch_stack() is not None
        if type(memory) not in PLAIN_TYPES or rewritten or is_tracing():
            # Overlapping windows need real memory; otherwise, index each element of each block.
            for block, stride in zip(self.blocks, strides[2:], strict=True):
                steps = torch.arange(block, device=offsets.device) * stride
                offsets = (offsets.unsqueeze(-1) + steps).flatten()
            flat = sum((size - 1) * stride for size, stride in zip(memory.shape, memory.stride(), strict=True)) + 1
            memory.as_strided((flat,), (1,)).index_fill_(0, offsets, value)
            return memory
        places = (self.samples, self.channels, *self.valid)
        last = sum((count - 1) * stride for count, stride in zip(places, strides, strict=True))
        windows = memory.as_strided((last + 1, *self.blocks), (1, *strides[2:]))
        windows.index_fill_(0, offsets, value)
        return memory

    def _offsets(self, seeds: Tensor, strides: Sequence[int]) -> Tensor:
        """The memory offset of each seed."""
        seeds = seeds.long()
        places, below = (self.samples, self.channels, *self.valid), 1
        offsets = seeds * strides[-1]
        for axis in range(len(places) - 1, 0, -1):
            below *= places[axis]
            # A step along an axis resets all faster axes.
            jump = strides[axis - 1] - places[axis] * strides[axis]
            if jump:
                offsets.add_(seeds.div(below, rounding_mode="floor"), alpha=jump)
        return offsets


blocks_of = lru_cache(maxsize=1024)(Blocks)


_WORDS, _EACH_BYTE = 128, 0x0101010101010101
_BIT_OF_EACH = 0x8040201008040201 - 2**64


def contiguous_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(sizes[axis + 1 :]) for axis in range(len(sizes)))


# --- the seed rate at which blocks cover an expected fraction of a map

GAMMA = ("exact", "paper")


@lru_cache(maxsize=4096)
def gamma_for(sizes: tuple[int, ...], blocks: tuple[int, ...], p: float, how: str = "exact") -> float:
    """Return the probability that a position where a whole block fits is a seed, so that blocks cover a fraction `p`.

    Example:
        >>> exact, paper = (gamma_for((14, 14), (7, 7), 0.5, of) for of in ("exact", "paper"))
        >>> round(exact / paper, 2)
        1.68
    """
    if p in (0.0, 1.0) or 0 in sizes:
        return p
    if how == "paper":
        area = math.prod(size / (block * (size - block + 1)) for size, block in zip(sizes, blocks, strict=True))
        return min(1.0, p * area)
    # Newton's method on dropped(gamma) = p, the mean over positions of 1 - (1 - gamma)^n(position). It is concave and
    # increasing, so the method converges from below, and a first step from above lands below. The only safeguard needed
    # is clamping to the open interval (0, 1).
    cover, lowest, highest = _cover_counts(sizes, blocks), math.ulp(0.0), math.nextafter(1.0, 0.0)
    gamma = min(max(p / sum(n * share for n, share in cover), lowest), highest)
    for _ in range(200):
        miss = math.log1p(-gamma)
        dropped = slope = 0.0
        for n, share in cover:
            hit = -math.expm1(n * miss)
            dropped += share * hit
            slope += share * n * (1.0 - hit)
        step = (p - dropped) * (1.0 - gamma) / slope
        gamma = min(max(gamma + step, lowest), highest)
        # Each step doubles the number of correct digits, so after such a small step the next would change nothing.
        if abs(step) <= 1e-8 * gamma:
            break
    return gamma


@lru_cache(maxsize=1024)
def _cover_counts(sizes: Sequence[int], blocks: Sequence[int]) -> tuple[tuple[int, float], ...]:
    """Pairs of a number of seeds that can cover a position and the share of positions with that number."""
    cover = Counter({1: 1})
    for size, block in zip(sizes, blocks, strict=True):
        valid = size - block + 1
        along = Counter(min(i, valid - 1) - max(0, i - block + 1) + 1 for i in range(size))
        product: Counter[int] = Counter()
        for n, times in cover.items():
            for m, more in along.items():
                product[n * m] += times * more
        cover = product
    total = sum(cover.values())
    return tuple((n, times / total) for n, times in cover.items())


def given_channel_axis(shape: Sequence[int], channel_dim: object, owner: str) -> int:
    """Return `channel_dim`, which may count from the end, as an axis other than the first."""
    rank, axis = len(shape), count(channel_dim, "channel_dim", owner, -5)
    if not -rank < axis < rank or axis == 0:
        raise ShapeError(f"got {tuple(shape)}: channel_dim={axis} is not one of its axes 1 to {rank - 1}.")
    return axis % rank

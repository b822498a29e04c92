"""What the GPU kernels of `triton_kernels` draw, computed with PyTorch operations: the reference that checks them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hookdrop.kernels.blocks import Blocks

_LOW = 2**32 - 1


def rows_of_seed(blocks: Blocks, seed: int, rate: int) -> Tensor:
    """Return the masks that `draw_kernel` draws, in the format of `Blocks.rows`. `rate` is a 64-bit fixed point."""
    word = torch.arange(blocks.packed_size[1] // 4, device="cpu").repeat(blocks.samples, 1)
    sample = torch.arange(blocks.samples, device="cpu")[:, None].expand_as(word)
    success, undecided = torch.zeros_like(word), torch.full_like(word, _LOW)
    for step in range(16):
        counter = (word, sample, torch.full_like(word, step), torch.zeros_like(word))
        for index, random in enumerate(_philox(seed, counter)):
            of_rate = _LOW * (rate >> (63 - 4 * step - index) & 1)
            success |= undecided & (random ^ _LOW) & of_rate
            undecided &= random ^ of_rate ^ _LOW
    bits = ((success | undecided).unsqueeze(-1) >> torch.arange(32, device="cpu")) & 1
    seeds = bits.flatten(1)[:, : blocks.elements_per_sample].view(blocks.samples, blocks.channels, *blocks.sizes)
    for axis, valid in enumerate(blocks.valid, start=2):
        seeds = seeds.narrow(axis, 0, valid)
    return blocks.dilated(seeds.to(torch.uint8).contiguous())


def _philox(seed: int, counter: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Philox-4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), in int64 tensors."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _LOW, seed >> 32 & _LOW
    for _ in range(10):
        p, q = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # the overflow does not change the 64 bits
        c0, c1, c2, c3 = (q >> 32 & _LOW) ^ c1 ^ k0, q & _LOW, (p >> 32 & _LOW) ^ c3 ^ k1, p & _LOW
        k0, k1 = k0 + 0x9E3779B9 & _LOW, k1 + 0xBB67AE85 & _LOW
    return c0, c1, c2, c3

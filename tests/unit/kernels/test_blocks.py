"""Writing and counting blocks, validated against plain loops."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor

from hookdrop.kernels.blocks import Blocks


def brute_force_mask(blocks: Blocks, seeds: Tensor) -> np.ndarray:
    """(samples, channels, *sizes): True inside the seeds' blocks."""
    valid = tuple(size - block + 1 for size, block in zip(blocks.sizes, blocks.blocks, strict=True))
    canvas = np.zeros((blocks.samples, blocks.channels, *blocks.sizes), dtype=bool)
    for seed in seeds.tolist():
        sample, channel, *corner = np.unravel_index(seed, (blocks.samples, blocks.channels, *valid))
        for steps in itertools.product(*map(range, blocks.blocks)):
            canvas[(sample, channel, *(at + step for at, step in zip(corner, steps, strict=True)))] = True
    return canvas


def dense(blocks: Blocks, seeds: Tensor) -> Tensor:
    """One byte per seed position, 1 for a seed."""
    return torch.zeros(blocks.places, dtype=torch.uint8).index_fill_(0, seeds.long(), 1)


@dataclass(frozen=True)
class Case:
    blocks: Blocks
    seeds: Tensor
    channels: int
    """The channels of the tensor. The blocks have 1 if the mask is shared."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor to mask."""
        shape = [self.blocks.samples, *self.blocks.sizes]
        shape.insert(self.blocks.channel, self.channels)
        return tuple(shape)

    @property
    def dropped(self) -> Tensor:
        """The brute-force mask in that shape."""
        mask = torch.from_numpy(brute_force_mask(self.blocks, self.seeds)).movedim(1, self.blocks.channel)
        return mask.expand(self.shape)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Maps with one to three axes, any block size, channels first or last, shared masks or not."""
    sizes = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    edges = tuple(draw(st.integers(1, size)) for size in sizes)
    channels, shared = draw(st.integers(1, 5)), draw(st.booleans())
    channel = draw(st.sampled_from([1, len(sizes) + 1]))
    blocks = Blocks(draw(st.integers(1, 4)), 1 if shared else channels, sizes, edges, channel)
    most = draw(st.sampled_from([0, 1, 3, 20, blocks.places]))
    order = torch.randperm(blocks.places, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    return Case(blocks, order[:most].sort().values.to(blocks.index_dtype), channels)


@given(case=cases())
def test_mask_of_random_geometries(case: Case) -> None:
    blocks, expected = case.blocks, case.dropped
    rows = blocks.rows(case.seeds)
    mask = blocks.mask(rows)
    assert mask.dtype == torch.bool
    assert mask.shape[blocks.channel] == blocks.channels
    assert torch.equal(mask.expand(case.shape), expected)
    assert torch.equal(blocks.dilated(dense(blocks, case.seeds)), rows)
    counts = blocks.counts(rows)
    assert counts.dtype == torch.int64
    assert counts.tolist() == brute_force_mask(blocks, case.seeds).reshape(blocks.samples, -1).sum(1).tolist()


@given(case=cases(), order=st.permutations(range(5)), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_zeroing_any_memory_format(case: Case, order: list[int], dtype: torch.dtype) -> None:
    """Dense tensors with any order of axes in memory. Nothing outside of the tensor is written."""
    if case.blocks.channels != case.channels:
        return
    axes = [axis for axis in order if axis < len(case.shape)]
    memory = torch.randn(math.prod(case.shape) + 8).to(dtype)
    before = memory.clone()
    x = memory[3:-5].view([case.shape[axis] for axis in axes]).permute(np.argsort(axes).tolist())
    expected, layout = torch.where(case.dropped, 0, x), (x.storage_offset(), x.stride())
    assert case.blocks.zero_(x, case.seeds) is x
    assert torch.equal(x, expected)
    assert (x.storage_offset(), x.stride()) == layout
    assert torch.equal(memory[:3], before[:3])
    assert torch.equal(memory[-5:], before[-5:])


def test_repeated_seeds() -> None:
    """A repeated seed counts once."""
    blocks = Blocks(2, 3, (8, 9), (3, 4))
    seeds = torch.tensor([5, 70, 71, 150])
    mixed = torch.tensor([5, 70, 71, 71, 150, 150])
    assert torch.equal(blocks.rows(mixed), blocks.rows(seeds))
    x, y = torch.ones(2, 2, 3, 8, 9)
    assert torch.equal(blocks.zero_(x, mixed), blocks.zero_(y, seeds))


@pytest.mark.parametrize("elements_per_sample", [1, 7, 32, 33, 2015, 2016, 2017, 2048, 2049, 2400, 3072, 3073, 100_000])
@pytest.mark.parametrize("samples", [1, 3])
def test_counts_of_full_masks_do_not_overflow_bytes(samples: int, elements_per_sample: int) -> None:
    """Words are summed in groups, since a byte of a sum holds at most 255. Rows are padded with zeros."""
    blocks = Blocks(samples, 1, (elements_per_sample,), (elements_per_sample,))
    for rows in (blocks.rows(torch.arange(samples)), blocks.dilated(torch.ones(samples, dtype=torch.uint8))):
        multiple = 32 if elements_per_sample <= 2016 else 1024
        assert rows.shape[1] % multiple == 0
        assert rows.shape[1] < elements_per_sample + multiple
        assert rows[:, :elements_per_sample].all()
        assert not rows[:, elements_per_sample:].any()
        assert blocks.counts(rows).tolist() == [elements_per_sample] * samples


@pytest.mark.parametrize(("samples", "dtype"), [(2**31 - 1, torch.int32), (2**31, torch.int64)])
def test_index_dtype_is_the_smallest_that_fits(samples: int, dtype: torch.dtype) -> None:
    blocks = Blocks(samples, 1, (3,), (3,))
    assert blocks.index_dtype == dtype
    assert blocks.places - 1 <= torch.iinfo(blocks.index_dtype).max

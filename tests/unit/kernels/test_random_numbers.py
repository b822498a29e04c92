"""Random numbers in eager code, and the operator that compiled code calls.

tests/integration/compile/test_compiled_hooks.py tests when compiled code calls it.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from torch import Tensor
from torch.func import vmap

import hookdrop
from hookdrop.kernels import random_numbers
from hookdrop.kernels.blocks import Blocks
from hookdrop.kernels.random_numbers import rand, rand_like, randint, randn_like, replayed, successes, trials
from tests.statistics.test_masks import MIN_P_VALUE, RATES, Sampler, by_successes, by_trials, gaps, numbers, positions
from tests.support.tensors import dilated
from tests.support.training import seeded

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
X = torch.zeros(2, 3, 4, 5, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)


def check_equal(ours: Callable[[], Tensor], theirs: Callable[[], Tensor]) -> None:
    """The same numbers, dtype, device and strides."""
    torch.testing.assert_close(seeded(ours), seeded(theirs), rtol=0, atol=0, check_stride=True)


@pytest.mark.parametrize("shape", [(), (4,), (0, 2), [2, 3], torch.Size([5, 1, 2])], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_equal_those_of_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check_equal(lambda: rand(shape, dtype, CPU), lambda: torch.rand(tuple(shape), dtype=dtype))
    check_equal(lambda: randint(9, tuple(shape), CPU), lambda: torch.randint(9, tuple(shape)))
    check_equal(lambda: rand_like(X, dtype), lambda: torch.rand_like(X, dtype=dtype))
    check_equal(lambda: randn_like(X, dtype), lambda: torch.randn_like(X, dtype=dtype))
    check_equal(lambda: randn_like(X), lambda: torch.randn_like(X))
    check_equal(lambda: replayed(torch.rand, 2, 3, dtype=dtype), lambda: torch.rand(2, 3, dtype=dtype))


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_each_slice_of_a_vmap_draws_as_in_torch(randomness: str) -> None:
    x = torch.zeros(3, 8)
    check_equal(
        lambda: vmap(lambda x: x + rand((8,), x.dtype, CPU), randomness=randomness)(x),
        lambda: vmap(lambda x: x + torch.rand(8), randomness=randomness)(x),
    )


@pytest.mark.parametrize(
    ("kind", "high", "dtype", "theirs"),
    [
        ("rand", 0, torch.float64, lambda: torch.rand(2, 3, dtype=torch.float64)),
        ("randn", 0, torch.bfloat16, lambda: torch.randn(2, 3, dtype=torch.bfloat16)),
        ("randint", 9, torch.int64, lambda: torch.randint(9, (2, 3))),
    ],
)
def test_operator(kind: str, high: int, dtype: torch.dtype, theirs: Callable[[], Tensor]) -> None:
    """It equals PyTorch's function, its fake implementation has the same metadata, and it is marked as random."""
    settings = {"dtype": dtype, "device": CPU}
    check_equal(lambda: random_numbers._NUMBERS(kind, high, [2, 3], **settings), theirs)
    torch.library.opcheck(random_numbers._NUMBERS, (kind, high, [2, 3]), settings, test_utils=("test_faketensor",))
    assert torch.Tag.nondeterministic_seeded in random_numbers._NUMBERS.tags


def test_rare_successes_among_many_trials() -> None:
    """10^11 trials at p = 1e-6: chi-square of the gaps, Kolmogorov-Smirnov of the positions."""
    assert gaps(by_successes, 1e-6) > MIN_P_VALUE
    at = successes(10**11, 1e-6, CPU)
    assert at.dtype == torch.int64
    assert 2**35 < at.max() < 10**11
    at = at.double() / 1e11
    assert scipy.stats.kstest(at.numpy(), "uniform").pvalue > MIN_P_VALUE


@pytest.mark.parametrize("p", [1e-12, 0.003, 0.3, 0.5, 0.97])
@pytest.mark.parametrize("sampler", [by_successes, by_trials])
def test_a_single_trial(sampler: Sampler, p: float) -> None:
    """It succeeds with probability p, within 4 standard errors over 4,000 repetitions."""
    found = [sampler(1, p).tolist() for _ in range(4000)]
    assert all(at in ([], [0]) for at in found)
    assert abs(sum(map(len, found)) / 4000 - p) < 4 * math.sqrt(p * (1 - p) / 4000) + 1e-9


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 1000])
def test_certain_and_impossible_trials(count: int) -> None:
    for static in (False, True):
        assert trials(count, 1.0, CPU, static=static).tolist() == [1] * count
        assert trials(count, 0.0, CPU, static=static).tolist() == [0] * count
        assert successes(count, 0.0, CPU).tolist() == []


@pytest.mark.parametrize("p", [*RATES, math.nextafter(1.0, 0.0), 1e-300])
@pytest.mark.parametrize("count", [1, 7, 100, 12_345])
def test_successes_are_sorted_unique_indices(count: int, p: float) -> None:
    at = successes(count, p, CPU)
    assert at.dtype == torch.int64
    assert at.tolist() == sorted(set(range(count)) & set(at.tolist()))


@pytest.mark.parametrize("p", [0.003, 0.1, 0.6])
@pytest.mark.parametrize("steps", [5, 17])
def test_a_batch_of_gaps_that_ends_early_is_continued(monkeypatch: pytest.MonkeyPatch, steps: int, p: float) -> None:
    """Normally the first batch is almost always sufficient. Here it never is, with the same distribution."""
    original, calls = random_numbers._logs, []

    def shorter(_: int, device: torch.device) -> Tensor:
        calls.append(steps)
        return original(steps, device)

    monkeypatch.setattr(random_numbers, "_logs", shorter)
    assert numbers(by_successes, p, 300) > MIN_P_VALUE
    assert len(calls) > 3 * 300
    assert gaps(by_successes, p, 400 * steps) > MIN_P_VALUE
    assert positions(by_successes, p, 400 * steps) > MIN_P_VALUE


def brute_force_mask(blocks: Blocks, seeds: Tensor) -> Tensor:
    """(samples, channels, *sizes): True inside the seeds' blocks."""
    valid = (size - block + 1 for size, block in zip(blocks.sizes, blocks.blocks, strict=True))
    return dilated(dense(blocks, seeds).bool().view(blocks.samples, blocks.channels, *valid), blocks.blocks)


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
        return brute_force_mask(self.blocks, self.seeds).movedim(1, self.blocks.channel).expand(self.shape)


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
    assert counts.tolist() == brute_force_mask(blocks, case.seeds).flatten(1).sum(1).tolist()


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


bernoulli = pytest.mark.skipif(torch.__version__ < (2, 14), reason="PyTorch 2.6 draws other numbers in bernoulli_")


def digest(numbers: torch.Tensor) -> str:
    return hashlib.sha256(str(numbers.flatten().tolist()).encode()).hexdigest()[:12]


@pytest.mark.parametrize(
    ("text", "shape", "expected"),
    [
        ("DropBlock(p=0.1, block_size=7)", (4, 64, 14, 14), "e8df4619c853"),
        ("DropBlock(p=0.5, block_size=3, per_channel=False)", (4, 8, 14, 14), "78f56625b7ac"),
        ("Dropout(p=0.1)", (40_000,), "d7a008e9cb2b"),
        pytest.param("Dropout2d(p=0.3)", (64, 64, 2, 2), "c149d8ad0768", marks=bernoulli),
        pytest.param("TokenDropout(p=0.2)", (64, 50, 2), "0b02e9a2c65c", marks=bernoulli),
    ],
)
def test_a_seed_gives_the_same_masks_on_every_machine(text: str, shape: tuple[int, ...], expected: str) -> None:
    """The positions that one machine dropped, with and without vector instructions and C loops."""
    if digest(torch.rand(1000, dtype=torch.float64)) != "f295b980ec55":
        pytest.skip("PyTorch itself draws other numbers here")
    torch.manual_seed(0)
    assert digest((hookdrop.parse(text)(torch.ones(shape)) == 0).flatten().nonzero()) == expected

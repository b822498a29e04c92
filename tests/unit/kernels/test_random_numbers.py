"""Random numbers in eager code, and the operator that compiled code calls.

tests/integration/compile/test_recompute.py tests when compiled code calls it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import scipy.stats
import torch
from torch import Tensor
from torch.func import vmap

from hookdrop.kernels import random_numbers
from hookdrop.kernels.random_numbers import rand, rand_like, randint, randn_like, replayed, successes, trials
from tests.statistics.test_bernoulli import (
    CPU,
    MIN_P_VALUE,
    RATES,
    Sampler,
    by_successes,
    by_trials,
    gaps,
    numbers,
    positions,
)

DTYPES = [torch.float32, torch.float64, torch.bfloat16]
X = torch.zeros(2, 3, 4, 5, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)


def drawn(draw: Callable[[], Tensor]) -> Tensor:
    torch.manual_seed(3)
    return draw()


def check_equal(ours: Callable[[], Tensor], theirs: Callable[[], Tensor]) -> None:
    """The same numbers, dtype, device and strides."""
    torch.testing.assert_close(drawn(ours), drawn(theirs), rtol=0, atol=0, check_stride=True)


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

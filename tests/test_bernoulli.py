"""Drawing only the successes, or eight trials to a random number, is the same as drawing every trial.

A statistic gives a p-value, and fails under `LEAST`: with the seed of conftest.py the outcome is fixed, and another
seed would fail one test in ten thousand. Every statistic is held against wrong samplers, too, and rejects them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor

from hookdrop.kernels import bernoulli
from hookdrop.kernels.bernoulli import ENOUGH, successes, trials

CPU = torch.device("cpu")
LEAST = 1e-4

Sampler = Callable[[int, float], Tensor]
"""(count, p) to the places of the successes, ascending."""


def by_successes(count: int, p: float) -> Tensor:
    return successes(count, p, CPU, static=False)


def by_static_successes(count: int, p: float) -> Tensor:
    return successes(count, p, CPU, static=True).unique() if count * p >= ENOUGH else by_successes(count, p)


def by_trials(count: int, p: float) -> Tensor:
    return trials(count, p, CPU, static=False).nonzero().flatten()


def by_static_trials(count: int, p: float) -> Tensor:
    return trials(count, p, CPU, static=True).nonzero().flatten()


def by_brute_force(count: int, p: float) -> Tensor:
    return (torch.rand(count, dtype=torch.float64) < p).nonzero().flatten()


def at_too_high_a_rate(count: int, p: float) -> Tensor:
    """By 5 % of what can still be added."""
    return by_brute_force(count, p + 0.05 * min(p, 1 - p))


def with_gaps_one_too_long(count: int, p: float) -> Tensor:
    at = by_brute_force(count, p)
    at = at + torch.arange(len(at))
    return at[at < count]


def more_of_them_in_front(count: int, p: float) -> Tensor:
    """By 5 % in the first half, and fewer in the second."""
    off = 0.05 * min(p, 1 - p)
    front, back = by_brute_force(count // 2, p + off), by_brute_force(count - count // 2, p - off)
    return torch.cat([front, back + count // 2])


def in_twos(count: int, p: float) -> Tensor:
    """Each trial decides two places."""
    return (torch.rand(-(-count // 2), dtype=torch.float64) < p).repeat_interleave(2)[:count].nonzero().flatten()


RIGHT = [by_successes, by_static_successes, by_trials, by_static_trials, by_brute_force]
RATES = [0.003, 1 / 256, 0.1, 0.25, 0.5, 0.97, 255 / 256 + 0.002]
"""0.25 is 64 / 256, which random bytes hit exactly; the last is above all that they can do."""


def fit(seen: np.ndarray, probabilities: np.ndarray) -> float:
    """The p-value of chi-square, neighbours put together until 10 are expected of each."""
    bins, low, expected = [], 0, seen.sum() * probabilities
    for high in range(1, len(seen) + 1):
        if expected[low:high].sum() >= 10 and (expected[high:].sum() >= 10 or high == len(seen)):
            bins.append((seen[low:high].sum(), expected[low:high].sum()))
            low = high
    observed, wanted = np.array(bins, dtype=float).T
    assert len(bins) > 1
    return float(scipy.stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue)


def binomial(found: np.ndarray, count: int, p: float) -> float:
    """Whether these are numbers of successes in `count` trials."""
    least, most = scipy.stats.binom.ppf([1e-9, 1 - 1e-9], count, p)
    support = np.arange(least, most + 2)
    below = np.concatenate([[0], scipy.stats.binom.cdf(support[:-1], count, p), [1]])
    return fit(np.bincount(np.searchsorted(support[:-1], found), minlength=len(support)), np.diff(below))


def numbers(sampler: Sampler, p: float, repetitions: int = 1500) -> float:
    """How many of 400 succeed, or of as many as 60 are expected of: binomial, by chi-square."""
    count = max(400, round(60 / p))
    return binomial(np.array([len(sampler(count, p)) for _ in range(repetitions)]), count, p)


def gaps(sampler: Sampler, p: float, wanted: int = 40_000) -> float:
    """From one success to the next: geometric, by chi-square."""
    at = sampler(int((wanted + 8 * math.sqrt(wanted)) / p) + 1, p)[:wanted]
    if len(at) < wanted:  # by more than 7 standard errors
        return 0.0
    between = np.diff(at.numpy(), prepend=-1)
    edges = np.unique(scipy.stats.geom.ppf(np.linspace(0, 1, 101)[1:-1], p))
    seen = np.bincount(np.searchsorted(edges, between), minlength=len(edges) + 1)
    below = np.concatenate([[0], scipy.stats.geom.cdf(edges, p), [1]])
    return fit(seen, np.diff(below))


def positions(sampler: Sampler, p: float, wanted: int = 40_000) -> float:
    """The successes in each 64th of the trials: independent binomials, by the sum of their squared deviations."""
    of_each = int(wanted / p / 64)
    seen = np.bincount(sampler(64 * of_each, p).numpy() // of_each, minlength=64)
    return float(scipy.stats.chi2.sf(((seen - of_each * p) ** 2).sum() / (of_each * p * (1 - p)), 64))


def pairs(sampler: Sampler, p: float, lag: int = 1, count: int = 2**18) -> float:
    """What one trial says of the one `lag` later: nothing, by chi-square over disjoint pairs."""
    row = torch.zeros(count, dtype=torch.int64)
    row[sampler(count, p)] = 1
    first, second = row[: count // (2 * lag) * 2 * lag].view(-1, 2, lag).unbind(1)
    seen = torch.bincount((2 * first + second).flatten(), minlength=4).numpy()
    return fit(seen, np.array([(1 - p) ** 2, p * (1 - p), p * (1 - p), p * p]))


@pytest.mark.parametrize("p", RATES)
@pytest.mark.parametrize("sampler", RIGHT)
def test_the_number_of_successes_is_binomial(sampler: Sampler, p: float) -> None:
    assert numbers(sampler, p) > LEAST


@pytest.mark.parametrize("p", RATES)
@pytest.mark.parametrize("sampler", RIGHT)
def test_gaps_are_geometric(sampler: Sampler, p: float) -> None:
    assert gaps(sampler, p) > LEAST


@pytest.mark.parametrize("p", RATES)
@pytest.mark.parametrize("sampler", RIGHT)
def test_every_place_is_as_likely(sampler: Sampler, p: float) -> None:
    assert positions(sampler, p) > LEAST


@pytest.mark.parametrize("lag", [1, 2, 7, 8, 64])
@pytest.mark.parametrize("p", [0.02, 0.1, 0.25, 0.5, 0.97])
@pytest.mark.parametrize("sampler", RIGHT[:4])
def test_trials_know_nothing_of_one_another(sampler: Sampler, p: float, lag: int) -> None:
    """Of the next, of the next but one, and at the distances of a byte and of a word that bytes are cut from."""
    assert pairs(sampler, p, lag) > LEAST


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize(
    ("statistic", "sampler"),
    [
        (numbers, at_too_high_a_rate),
        (numbers, with_gaps_one_too_long),
        (numbers, in_twos),
        (gaps, at_too_high_a_rate),
        (gaps, with_gaps_one_too_long),
        (gaps, in_twos),
        (positions, at_too_high_a_rate),
        (positions, more_of_them_in_front),
        (pairs, at_too_high_a_rate),
        (pairs, in_twos),
    ],
)
def test_the_statistics_reject_wrong_samplers(
    statistic: Callable[[Sampler, float], float], sampler: Sampler, p: float
) -> None:
    """They could fail: a rate off by 5 %, gaps off by one, a slope of 5 %, trials in twos."""
    assert statistic(sampler, p) < LEAST / 100


@pytest.mark.parametrize("p", RATES)
@pytest.mark.parametrize("sampler", RIGHT)
def test_the_mean_number_is_np(sampler: Sampler, p: float) -> None:
    """Within 4 standard errors: of 2 million trials, 0.14 % of their number or less where p is one half."""
    count = 2_000_000
    assert abs(len(sampler(count, p)) - count * p) < 4 * math.sqrt(count * p * (1 - p))


@pytest.mark.parametrize("sampler", [by_successes, by_static_successes])
def test_a_rare_success_costs_no_trials(sampler: Sampler) -> None:
    """10^11 trials at p = 1e-6: gaps, and where the successes are, as chi-square and Kolmogorov-Smirnov see them."""
    assert gaps(sampler, 1e-6) > LEAST
    at = sampler(10**11, 1e-6).double() / 1e11
    assert scipy.stats.kstest(at.numpy(), "uniform").pvalue > LEAST


@pytest.mark.parametrize("sampler", [by_successes, by_static_successes])
def test_very_many_trials_of_very_small_probability(sampler: Sampler) -> None:
    """10^9 at 1e-7: 100 of them, give or take, over 1,500 repetitions; places past 2^31 are reached as others are."""
    found = [sampler(10**9, 1e-7) for _ in range(1500)]
    assert binomial(np.array([len(at) for at in found]), 10**9, 1e-7) > LEAST
    assert scipy.stats.kstest(torch.cat(found).numpy() / 1e9, "uniform").pvalue > LEAST


def test_places_beyond_32_bits() -> None:
    at = successes(2**36, 1e-9, CPU, static=False)
    assert at.dtype == torch.int64
    assert 2**35 < at.max() < 2**36


@pytest.mark.parametrize("p", [1e-12, 0.003, 0.3, 0.5, 0.97])
@pytest.mark.parametrize("sampler", [by_successes, by_trials])
def test_one_trial(sampler: Sampler, p: float) -> None:
    """It succeeds with probability p, within 4 standard errors of 4,000 repetitions."""
    found = [sampler(1, p).tolist() for _ in range(4000)]
    assert all(at in ([], [0]) for at in found)
    assert abs(sum(map(len, found)) / 4000 - p) < 4 * math.sqrt(p * (1 - p) / 4000) + 1e-9


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 1000])
def test_certain_and_impossible_trials(count: int) -> None:
    for static in (False, True):
        assert trials(count, 1.0, CPU, static=static).tolist() == [1] * count
        assert trials(count, 0.0, CPU, static=static).tolist() == [0] * count
        assert successes(count, 0.0, CPU, static=static).tolist() == []


@pytest.mark.parametrize("p", [0.0, 0.003, 0.5, 1.0])
def test_no_trials(p: float) -> None:
    for static in (False, True):
        assert trials(0, p, CPU, static=static).shape == (0,)
        assert p == 1.0 or successes(0, p, CPU, static=static).shape == (0,)


@pytest.mark.parametrize("p", [*RATES, math.nextafter(1.0, 0.0), 1e-300])
@pytest.mark.parametrize("count", [1, 7, 100, 12_345])
def test_successes_are_places_in_order(count: int, p: float) -> None:
    at = successes(count, p, CPU, static=False)
    assert at.dtype == torch.int64
    assert at.tolist() == sorted(set(range(count)) & set(at.tolist()))


@pytest.mark.parametrize("p", [0.0, *RATES, math.nextafter(1.0, 0.0), 1.0])
@pytest.mark.parametrize("count", [1, 7, 8, 9, 12_345])
def test_trials_are_zeros_and_ones(count: int, p: float) -> None:
    for static in (False, True):
        result = trials(count, p, CPU, static=static)
        assert result.dtype == torch.uint8
        assert result.shape == (count,)
        assert set(result.tolist()) <= {0, 1}


@pytest.mark.parametrize("p", [0.003, 0.1, 0.6])
@pytest.mark.parametrize("steps", [5, 17])
def test_a_walk_that_ends_early_is_continued(monkeypatch: pytest.MonkeyPatch, steps: int, p: float) -> None:
    """The first batch nearly always reaches the end; here none does, and the distribution is the same."""
    walk, walks = bernoulli._walk, []

    def shorter(_: int, p: float, device: torch.device) -> Tensor:
        walks.append(p)
        return walk(steps, p, device)

    monkeypatch.setattr(bernoulli, "_walk", shorter)
    assert numbers(by_successes, p, 300) > LEAST
    assert len(walks) > 3 * 300
    assert gaps(by_successes, p, 400 * steps) > LEAST
    assert positions(by_successes, p, 400 * steps) > LEAST


@pytest.mark.parametrize("p", [0.01, 0.3, 0.97])
def test_what_is_static_are_the_same_successes(p: float) -> None:
    """Under one seed; the last is repeated, so that they stay in order."""
    for seed in range(50):
        torch.manual_seed(seed)
        at = successes(5000, p, CPU, static=False)
        torch.manual_seed(seed)
        padded = successes(5000, p, CPU, static=True)
        assert torch.equal(padded[: len(at)], at)
        assert len(padded) > len(at)
        assert (padded[len(at) :] == at[-1]).all()


@pytest.mark.parametrize("p", [0.01, 0.3, 0.97])
def test_static_length_depends_on_count_and_p_alone(p: float) -> None:
    assert len({len(successes(5000, p, CPU, static=True)) for _ in range(200)}) == 1


def test_enough_is_enough() -> None:
    """Where static drawing is allowed, none at all and more than there is room for are matters of 1e-13."""
    assert math.exp(-ENOUGH) < 1e-17
    room = len(successes(10**6, ENOUGH / 10**6, CPU, static=True))
    assert scipy.stats.binom.sf(room - 1, 10**6, ENOUGH / 10**6) < 1e-13


@pytest.mark.parametrize("p", [0.003, 0.3])
@pytest.mark.parametrize("sampler", RIGHT[:4])
def test_the_seed_decides_and_no_other_generator_is_used(sampler: Sampler, p: float) -> None:
    others = random.getstate(), np.random.get_state()[1].tolist()
    torch.manual_seed(5)
    first, after = sampler(20_000, p), torch.get_rng_state()
    torch.manual_seed(5)
    again = sampler(20_000, p)
    assert torch.equal(first, again)
    assert torch.equal(after, torch.get_rng_state())
    assert not torch.equal(first, sampler(20_000, p))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == others

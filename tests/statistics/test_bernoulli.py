"""Drawing only the successes, or eight trials to a random number, is the same as drawing every trial.

A statistic gives a p-value, and fails under `LEAST`: with the seed of conftest.py the outcome is fixed, and another
seed would fail one test in ten thousand. Every statistic is held against wrong samplers, too, and rejects them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.bernoulli import (
    LEAST,
    RATES,
    RIGHT,
    Sampler,
    by_brute_force,
    fit,
    gaps,
    numbers,
    positions,
)


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

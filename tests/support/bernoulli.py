"""Samplers of Bernoulli successes, and statistical tests of them."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import scipy.stats
import torch
from torch import Tensor

from hookdrop.kernels.random_numbers import successes, trials

CPU = torch.device("cpu")
MIN_P_VALUE = 1e-4
Sampler = Callable[[int, float], Tensor]
"""A function of (count, p) that returns the sorted indices of the successes."""


def by_successes(count: int, p: float) -> Tensor:
    return successes(count, p, CPU)


def by_trials(count: int, p: float) -> Tensor:
    return trials(count, p, CPU, static=False).nonzero().flatten()


def by_static_trials(count: int, p: float) -> Tensor:
    return trials(count, p, CPU, static=True).nonzero().flatten()


def by_brute_force(count: int, p: float) -> Tensor:
    return (torch.rand(count, dtype=torch.float64) < p).nonzero().flatten()


SAMPLERS = [by_successes, by_trials, by_static_trials, by_brute_force]
RATES = [0.003, 1 / 256, 0.1, 0.25, 0.5, 0.97, 255 / 256 + 0.002]
"""0.25 is 64 / 256, which random bytes represent exactly; the last rate is beyond their range."""


def fit(seen: np.ndarray, probabilities: np.ndarray) -> float:
    """The p-value of chi-square. Adjacent bins are merged up to 10 expected counts each."""
    bins, low, expected = [], 0, seen.sum() * probabilities
    for high in range(1, len(seen) + 1):
        if expected[low:high].sum() >= 10 and (expected[high:].sum() >= 10 or high == len(seen)):
            bins.append((seen[low:high].sum(), expected[low:high].sum()))
            low = high
    observed, wanted = np.array(bins, dtype=float).T
    assert len(bins) > 1
    return float(scipy.stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue)


def binomial(found: np.ndarray, count: int, p: float) -> float:
    """The p-value of `found` as numbers of successes in `count` trials."""
    least, most = scipy.stats.binom.ppf([1e-9, 1 - 1e-9], count, p)
    support = np.arange(least, most + 2)
    below = np.concatenate([[0], scipy.stats.binom.cdf(support[:-1], count, p), [1]])
    return fit(np.bincount(np.searchsorted(support[:-1], found), minlength=len(support)), np.diff(below))


def numbers(sampler: Sampler, p: float, repetitions: int = 1500) -> float:
    """Test that the number of successes is binomial, by chi-square."""
    count = max(400, round(60 / p))
    return binomial(np.array([len(sampler(count, p)) for _ in range(repetitions)]), count, p)


def gaps(sampler: Sampler, p: float, wanted: int = 40_000) -> float:
    """Test that the gaps between successes are geometric, by chi-square."""
    at = sampler(int((wanted + 8 * math.sqrt(wanted)) / p) + 1, p)[:wanted]
    if len(at) < wanted:  # by more than 7 standard errors
        return 0.0
    between = np.diff(at.numpy(), prepend=-1)
    edges = np.unique(scipy.stats.geom.ppf(np.linspace(0, 1, 101)[1:-1], p))
    seen = np.bincount(np.searchsorted(edges, between), minlength=len(edges) + 1)
    below = np.concatenate([[0], scipy.stats.geom.cdf(edges, p), [1]])
    return fit(seen, np.diff(below))


def positions(sampler: Sampler, p: float, wanted: int = 40_000) -> float:
    """Test that the counts in 64 equal parts are independent binomials, by their squared deviations."""
    of_each = int(wanted / p / 64)
    seen = np.bincount(sampler(64 * of_each, p).numpy() // of_each, minlength=64)
    return float(scipy.stats.chi2.sf(((seen - of_each * p) ** 2).sum() / (of_each * p * (1 - p)), 64))

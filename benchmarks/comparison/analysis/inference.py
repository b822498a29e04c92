"""Tests of paired differences, and their power."""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq
from scipy.stats import nct, permutation_test
from scipy.stats import t as student

from comparison.analysis.intervals import IMAGE_RESAMPLES, over_both, over_seeds, resamples, standard_error
from comparison.analysis.schema import LEVEL, METRICS, UNCLEAR, Difference, Metric
from comparison.run.metrics import BINS, bin_of
from comparison.run.record import Record

POWER = 0.8
EXACT_PAIRS, RANDOM_FLIPS = 20, 100_000
"""Maximum number of pairs for the exact test with all sign flips, and the number of random ones with more pairs."""


@dataclass(frozen=True)
class RunMetric:
    value: float
    resampled_B: NDArray[np.float64] = field(repr=False)  # on bootstrap samples of the images, the same for all runs


def run_metrics(record: Record) -> dict[Metric, RunMetric]:
    assert record.outcome is not None
    again = resampled(record.images, resamples(len(record.images["correct"]), IMAGE_RESAMPLES, 1))
    return {metric: RunMetric(record.outcome[metric], again[metric]) for metric in METRICS}


def resampled(images: Mapping[str, NDArray[Any]], counts_BN: NDArray[np.uint8]) -> dict[Metric, NDArray[np.float64]]:
    """Compute each metric on B bootstrap samples, given the count of each image in each sample, of shape (B, N)."""
    confidence_N, correct_N = (images[name].astype(np.float64) for name in ("confidence", "correct"))
    size = len(correct_N)
    gaps_NM = np.zeros((size, BINS))
    gaps_NM[np.arange(size), bin_of(confidence_N)] = confidence_N - correct_N
    columns = np.column_stack([correct_N, images["nll"].astype(np.float64), gaps_NM])
    blocks = np.array_split(counts_BN, max(1, counts_BN.size // 2_000_000))
    means = np.concatenate([block.astype(np.float64) @ columns for block in blocks]) / size
    return {"accuracy": 100 * means[:, 0], "nll": means[:, 1], "ece": 100 * np.abs(means[:, 2:]).sum(axis=1)}


def difference(a: Mapping[int, RunMetric], b: Mapping[int, RunMetric]) -> Difference:
    """The paired difference `a - b` over the common seeds, before Holm's correction."""
    seeds = sorted(a.keys() & b.keys())
    if not seeds:
        raise ValueError(f"no common seeds: {sorted(a)} and {sorted(b)}. Nothing was compared.")
    values = [a[seed].value - b[seed].value for seed in seeds]
    low, high = over_seeds(values)
    images = over_both(values, np.stack([a[seed].resampled_B - b[seed].resampled_B for seed in seeds]))
    p, mde = permutation_p(values), minimum_detectable(values)
    # Few pairs, or pairs without spread, may have an interval that excludes 0; the exact test accounts for that.
    certain = smallest_p(len(values)) <= LEVEL and (low < high or p <= LEVEL)
    return Difference(
        seeds=seeds, values=values, mean=float(np.mean(values)),
        low=low, high=high, low_images=images[0], high_images=images[1],
        p=p, p_holm=p, p_smallest=smallest_p(len(seeds)),
        mde=mde, seeds_for_half=None if mde is None else pairs_for_half(len(seeds)),
        verdict="above" if certain and low > 0 else "below" if certain and high < 0 else UNCLEAR,
    )  # fmt: skip


def holm_corrected(family: Sequence[Difference]) -> list[Difference]:
    """The differences with Holm's correction over the whole family."""
    adjusted = holm([found.p for found in family])
    return [found.model_copy(update={"p_holm": p}) for found, p in zip(family, adjusted, strict=True)]


def permutation_p(values: ArrayLike) -> float:
    """Two-sided p of the sign-flip permutation test of the mean; 1 without values, or if all are 0.

    The test is exact for up to `EXACT_PAIRS` values: all sums of signed values, which takes 0.3 ms for 16 pairs, where
    SciPy's exact test takes more than a second. SciPy draws the random flips of more values.
    """
    values_S = np.asarray(values, dtype=np.float64)
    if len(values_S) > EXACT_PAIRS:
        flips: dict[str, Any] = {"permutation_type": "samples", "n_resamples": RANDOM_FLIPS, "batch": 10_000}
        return float(permutation_test((values_S,), np.mean, vectorized=True, rng=len(values_S), **flips).pvalue)
    # By symmetry, the first sign can be fixed.
    sums = values_S[:1].copy()
    for value in values_S[1:]:
        sums = np.concatenate([sums + value, sums - value])
    reached = abs(values_S.sum()) - 1e-9 * np.abs(values_S).sum()
    return float((np.abs(sums) >= reached).mean()) if len(sums) else 1.0


def smallest_p(pairs: int) -> float:
    """The smallest possible `permutation_p` for a number of pairs."""
    return min(1.0, 2.0 ** (1 - pairs)) if pairs <= EXACT_PAIRS else 2 / (1 + RANDOM_FLIPS)


def pairs_needed(differences: int) -> int:
    """The smallest number of pairs with which one of the differences can be significant after Holm's correction."""
    return next(pairs for pairs in count(1) if differences * smallest_p(pairs) <= LEVEL)


def holm(ps: Sequence[float]) -> list[float]:
    """Holm's step-down adjusted p-values (statsmodels 0.15 is slower: it collects all garbage in each call)."""
    ranked = pd.Series(ps, dtype=float).sort_values()
    adjusted: list[float] = (ranked * np.arange(len(ps), 0, -1)).clip(upper=1.0).cummax().sort_index().tolist()
    return adjusted


def minimum_detectable(values: ArrayLike) -> float | None:
    """The true difference that a two-sided paired t test at 5 % detects with 80 % power; None without spread."""
    values_S = np.asarray(values, dtype=np.float64)
    error = standard_error(values_S)
    return _noncentrality(len(values_S)) * error if error else None


def pairs_for_half(pairs: int) -> int:
    """The number of pairs that halves `minimum_detectable` at the same spread, given `pairs` (at least 2)."""
    half = detectable(pairs) / 2
    return pairs + bisect_left(range(pairs, 8 * pairs), True, key=lambda more: detectable(more) <= half)


def detectable(pairs: int) -> float:
    """The difference that `pairs` detect with 80 % power, in standard deviations of the paired differences."""
    return _noncentrality(pairs) / math.sqrt(pairs)


@lru_cache(maxsize=4096)
def _noncentrality(pairs: int) -> float:
    """The ratio of true mean to standard error that the t test detects with 80 % power.

    The opposite tail adds less than 1e-5 to the power. `TTestPower` of statsmodels 0.15 has no solution for some
    numbers of pairs (73, 87, 92, ...) and a wrong number of pairs for 2.
    """
    critical = student.ppf(1 - LEVEL / 2, pairs - 1)
    return float(brentq(lambda shift: nct.sf(critical, pairs - 1, shift) - POWER, 1.0, 100.0))

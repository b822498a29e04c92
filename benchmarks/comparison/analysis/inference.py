"""Intervals, tests and power of paired differences. `benchmarks/README.md` lists the coverage of these intervals."""

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

from comparison.analysis.schema import LEVEL, METRICS, UNCLEAR, Difference, Metric
from comparison.run.metrics import BINS, bin_of
from comparison.run.record import Record

POWER = 0.8
RESAMPLES, IMAGE_RESAMPLES, TAIL = 10_000, 2_000, 0.025
WIDEST = 5.0  # maximum ratio of a bootstrap-t limit to the t interval's limit
ROUNDING = 1e-9  # relative tolerance below which two differences count as equal
Interval = tuple[float, float]
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


def over_seeds(values: ArrayLike) -> Interval:
    """Bootstrap-t interval of the mean, at least as wide as the t interval on each side; a point for one value.

    It is deterministic: the bootstrap samples depend only on the number of values.
    """
    values_S = np.asarray(values, dtype=np.float64)
    error = standard_error(values_S)
    if error == 0:
        return float(values_S.mean()), float(values_S.mean())
    counts_BS = resamples(len(values_S), RESAMPLES, 0)
    least = float(student.ppf(1 - TAIL, len(values_S) - 1))
    low, high = (_capped(limit, least) for limit in _limits(counts_BS, values_S[None], 0.0))
    return float(values_S.mean() - max(high, least) * error), float(values_S.mean() - min(low, -least) * error)


def over_both(values: ArrayLike, resampled_SB: NDArray[np.float64]) -> Interval:
    """Interval that also accounts for the sampling of test images; it contains `over_seeds`.

    Seeds and images are resampled independently, with the same images in all runs (crossed, as in Owen 2007). Each
    resampled mean is divided by its standard error over the resampled seeds and over the image bootstrap. This counts
    the seed-image interaction twice, so the interval is conservative.

    Args:
        values: The differences on all images, of shape (S,).
        resampled_SB: The differences on the bootstrap samples of images from `resamples(N, B, 1)`, of shape (S, B).
            Only their spread is used, because resampling biases metrics such as ECE upward.
    """
    values_S = np.asarray(values, dtype=np.float64)
    if len(values_S) == 1:
        return over_seeds(values_S)
    shifted_BS = (resampled_SB - resampled_SB.mean(axis=1, keepdims=True)).T + values_S
    of_images = float(shifted_BS.mean(axis=1).var())
    seeds = over_seeds(values_S)
    if of_images <= (ROUNDING * np.abs(values_S).max()) ** 2:
        return seeds
    counts_BS = resamples(len(values_S), resampled_SB.shape[1], 2)
    least = float(student.ppf(1 - TAIL, len(values_S) - 1))
    low, high = (_capped(limit, least) for limit in _limits(counts_BS, shifted_BS, of_images))
    error = float(np.hypot(standard_error(values_S), np.sqrt(of_images)))
    return min(seeds[0], float(values_S.mean()) - high * error), max(seeds[1], float(values_S.mean()) - low * error)


def _capped(limit: float, least: float) -> float:
    """Limit to `WIDEST` times the t interval: with few seeds, some resamples have almost no spread."""
    most = least * (WIDEST if np.isfinite(limit) else 1.0)
    return float(np.clip(limit, -most, most))


def standard_error(values_S: NDArray[np.float64]) -> float:
    """Standard error of the mean; 0 for a single value or equal values."""
    if np.ptp(values_S) <= ROUNDING * np.abs(values_S).max():
        return 0.0
    return float(values_S.std(ddof=1) / np.sqrt(len(values_S)))


@lru_cache(maxsize=16)
def resamples(size: int, count: int, stream: int) -> NDArray[np.uint8]:
    """Counts of each item in each bootstrap sample, of shape (count, size); deterministic."""
    drawn = np.random.default_rng((stream, size, count)).integers(size, size=(count, size))
    drawn += np.arange(count)[:, None] * size
    return np.bincount(drawn.ravel(), minlength=count * size).astype(np.uint8).reshape(count, size)


def _limits(counts_BS: NDArray[np.uint8], values_BS: NDArray[np.float64], of_images: float) -> Interval:
    """The 2.5 % and 97.5 % quantiles of (resampled mean - mean) / standard error; infinite without spread."""
    count, seeds = counts_BS.shape
    deviations_BS = values_BS - values_BS.mean()
    mean_B = (counts_BS * deviations_BS).sum(axis=1) / seeds
    square_B = (counts_BS * deviations_BS**2).sum(axis=1) / seeds
    variance_B = square_B - mean_B**2
    variance_B[variance_B <= 1e-12 * square_B] = 0
    error_B = np.sqrt(variance_B / (seeds - 1) + of_images)
    mean_B[np.abs(mean_B) <= ROUNDING * np.abs(deviations_BS).max()] = 0
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.sort(np.where(mean_B == 0, 0.0, mean_B / error_B))
    outside = int(TAIL * count)
    return float(ratios[outside - 1]), float(ratios[count - outside])

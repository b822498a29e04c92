"""95 % bootstrap intervals of the mean paired difference; `benchmarks/README.md` lists their coverage and others'."""

from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import t as student

RESAMPLES, IMAGE_RESAMPLES, TAIL = 10_000, 2_000, 0.025
WIDEST = 5.0  # maximum ratio of a bootstrap-t limit to the t interval's limit
ROUNDING = 1e-9  # relative tolerance below which two differences count as equal
Interval = tuple[float, float]


def over_seeds(values: ArrayLike) -> Interval:
    """Bootstrap-t interval of the mean, at least as wide as the t interval on each side; a point for one value.

    It is deterministic: the bootstrap samples depend only on the number of values.
    """
    values_S = np.asarray(values, dtype=np.float64)
    error = standard_error(values_S)
    if error == 0:
        return float(values_S.mean()), float(values_S.mean())
    counts_BS = resamples(len(values_S), RESAMPLES, 0)
    low, high = _limits(counts_BS, values_S[None], 0.0)
    least = float(student.ppf(1 - TAIL, len(values_S) - 1))
    low, high = (_capped(limit, least) for limit in (low, high))
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
    return (
        float(np.clip(limit, -WIDEST * least, WIDEST * least)) if np.isfinite(limit) else least * float(np.sign(limit))
    )


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

"""Drawing only the successes, or eight trials per random number, is equivalent to drawing every trial.

DropBlock's masks have the distribution of the plain algorithm, for every drawing method: these are forced and compared
with brute force, one float64 random number per position, and a block for each number below gamma. A test fails if the
p-value of its statistic is below `MIN_P_VALUE`. The seed in conftest.py fixes the outcome; another seed would fail one
test in ten thousand. Every statistic is also validated against wrong samplers and rates, which it rejects.
"""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor

from hookdrop.functional import drop_block
from hookdrop.kernels import drawing
from hookdrop.kernels.blocks import Blocks, gamma_for
from hookdrop.kernels.random_numbers import successes, trials
from tests.support.tensors import dilated

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


def at_too_high_a_rate(count: int, p: float) -> Tensor:
    """By 5% of min(p, 1 - p)."""
    return by_brute_force(count, p + 0.05 * min(p, 1 - p))


def with_gaps_one_too_long(count: int, p: float) -> Tensor:
    at = by_brute_force(count, p)
    at = at + torch.arange(len(at))
    return at[at < count]


def with_more_in_the_first_half(count: int, p: float) -> Tensor:
    """The rate is 5% higher in the first half and lower in the second."""
    off = 0.05 * min(p, 1 - p)
    front, back = by_brute_force(count // 2, p + off), by_brute_force(count - count // 2, p - off)
    return torch.cat([front, back + count // 2])


def in_pairs(count: int, p: float) -> Tensor:
    return (torch.rand(-(-count // 2), dtype=torch.float64) < p).repeat_interleave(2)[:count].nonzero().flatten()


def pairs(sampler: Sampler, p: float, lag: int = 1, count: int = 2**18) -> float:
    """Independence of trials at distance `lag`, by chi-square over disjoint pairs."""
    row = torch.zeros(count, dtype=torch.int64)
    row[sampler(count, p)] = 1
    first, second = row[: count // (2 * lag) * 2 * lag].view(-1, 2, lag).unbind(1)
    seen = torch.bincount((2 * first + second).flatten(), minlength=4).numpy()
    return fit(seen, np.array([(1 - p) ** 2, p * (1 - p), p * (1 - p), p * p]))


@pytest.mark.parametrize("p", RATES)
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("statistic", [numbers, gaps, positions])
def test_numbers_are_binomial_gaps_geometric_and_positions_uniform(
    statistic: Callable[[Sampler, float], float], sampler: Sampler, p: float
) -> None:
    assert statistic(sampler, p) > MIN_P_VALUE


@pytest.mark.parametrize("lag", [1, 2, 7, 8, 64])
@pytest.mark.parametrize("p", [0.02, 0.1, 0.25, 0.5, 0.97])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_trials_are_independent(sampler: Sampler, p: float, lag: int) -> None:
    """Of neighbors, and at the distances of a byte and of a 64-bit word."""
    assert pairs(sampler, p, lag) > MIN_P_VALUE


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize(
    ("statistic", "sampler"),
    [
        *itertools.product((numbers, gaps), (at_too_high_a_rate, with_gaps_one_too_long, in_pairs)),
        *itertools.product((positions,), (at_too_high_a_rate, with_more_in_the_first_half)),
        *itertools.product((pairs,), (at_too_high_a_rate, in_pairs)),
    ],
)
def test_wrong_samplers_are_rejected(statistic: Callable[[Sampler, float], float], sampler: Sampler, p: float) -> None:
    """A rate off by 5%, gaps off by one, a slope of 5%, trials in pairs."""
    assert statistic(sampler, p) < MIN_P_VALUE / 100


METHODS = ["sparse", "dense", "static dense"]
"""Only the seeds; a trial per position; PyTorch draws the trials."""
Sizes = tuple[int, ...]


def reach(sizes: Sizes, edges: Sizes) -> Tensor:
    """The number of seeds whose block has a position, for each position."""
    counts = torch.ones((), dtype=torch.float64)
    for size, edge in zip(sizes, edges, strict=True):
        along = [sum(corner <= at < corner + edge for corner in range(size - edge + 1)) for at in range(size)]
        counts = counts[..., None] * torch.tensor(along, dtype=torch.float64)
    return counts


def blocks_by_brute_force(samples: int, channels: int, sizes: Sizes, p: float, edges: Sizes) -> Tensor:
    """Bool (samples, channels, *sizes), True where dropped."""
    valid = [size - edge + 1 for size, edge in zip(sizes, edges, strict=True)]
    return dilated(torch.rand(samples, channels, *valid, dtype=torch.float64) < gamma_for(sizes, edges, p), edges)


def masks(how: str, samples: int, channels: int, sizes: Sizes, p: float, edges: Sizes, shared: bool = False) -> Tensor:
    """Masks drawn by `drop_block` with the given method."""
    if how == "brute force":
        return blocks_by_brute_force(samples, 1 if shared else channels, sizes, p, edges).expand(-1, channels, *sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawing, "_sparse", lambda *_: "dense" not in how)
        if "static" in how:
            patch.setattr(drawing, "must_avoid_sync", lambda _: True)
        x = torch.ones(samples, channels, *sizes)
        return drop_block(x, p, edges, normalize=None, channel_dim=1, per_channel=not shared) == 0


def codes(maps: Tensor) -> np.ndarray:
    bits = 2 ** torch.arange(math.prod(maps.shape[2:]))
    return (maps.flatten(2) * bits).sum(2).numpy()


def independent(first: np.ndarray, second: np.ndarray) -> float:
    """The p-value of chi-square for the independence of two arrays of small integers."""
    table = np.zeros((first.max() + 1, second.max() + 1))
    np.add.at(table, (first, second), 1)
    return float(scipy.stats.chi2_contingency(table).pvalue)


SMALL = [((6,), (3,)), ((3, 3), (2, 2)), ((3, 4), (2, 2)), ((4, 4), (3, 2)), ((2, 3, 2), (1, 2, 2)), ((3, 3), (1, 1))]
"""Maps small enough to enumerate all patterns of seeds."""


def all_masks(sizes: tuple[int, ...], edges: tuple[int, ...], gamma: float) -> dict[int, float]:
    """The probability of each mask code: the sum over the seed patterns that produce it."""
    places = list(itertools.product(*(range(size - edge + 1) for size, edge in zip(sizes, edges, strict=True))))
    blocks = []
    for place in places:
        block = torch.zeros(1, 1, *sizes, dtype=torch.bool)
        block[(0, 0, *(slice(at, at + edge) for at, edge in zip(place, edges, strict=True)))] = True
        blocks.append(codes(block).item())
    result: dict[int, float] = {}
    for pattern in itertools.product([0, 1], repeat=len(places)):
        code = 0
        for block in itertools.compress(blocks, pattern):
            code |= block
        result[code] = result.get(code, 0.0) + gamma ** sum(pattern) * (1 - gamma) ** (len(pattern) - sum(pattern))
    return result


def whole_masks(drawn: Tensor, sizes: tuple[int, ...], edges: tuple[int, ...], p: float) -> float:
    probabilities = all_masks(sizes, edges, gamma_for(sizes, edges, p))
    numbers = sorted(probabilities)
    found = codes(drawn).flatten()
    seen = np.bincount(found, minlength=numbers[-1] + 1)[numbers]
    assert seen.sum() == len(found), "a mask that no pattern of seeds produces"
    return fit(seen, np.array([probabilities[number] for number in numbers]))


@pytest.mark.parametrize("p", [0.05, 0.3, 0.9])
@pytest.mark.parametrize(("sizes", "edges"), SMALL)
@pytest.mark.parametrize("method", [*METHODS, "brute force"])
def test_mask_distribution_matches_the_seed_patterns(method: str, sizes: Sizes, edges: Sizes, p: float) -> None:
    """All masks of small maps, over 20,000 maps."""
    assert whole_masks(masks(method, 200, 100, sizes, p, edges), sizes, edges, p) > MIN_P_VALUE


@pytest.mark.parametrize("method", METHODS)
def test_shared_mask_distribution_matches_the_seed_patterns(method: str) -> None:
    drawn = masks(method, 20_000, 3, (3, 4), 0.3, (2, 2), shared=True)
    assert torch.equal(drawn, drawn[:, :1].expand_as(drawn))
    assert whole_masks(drawn[:, :1], (3, 4), (2, 2), 0.3) > MIN_P_VALUE


@pytest.mark.parametrize("wrong", [0.95, 1.05])
def test_a_rate_off_by_5_percent_is_rejected(wrong: float) -> None:
    """In the distribution of masks and in the dropped fraction."""
    drawn = blocks_by_brute_force(200, 100, (3, 4), 0.3 * wrong, (2, 2))
    assert whole_masks(drawn, (3, 4), (2, 2), 0.3) < MIN_P_VALUE / 100
    fractions = drawn.double().flatten(2).mean(2)
    assert abs(fractions.mean() - 0.3) > 8 * fractions.std() / math.sqrt(fractions.numel())


@pytest.mark.parametrize("rate", [0.002, 0.02, 0.3])
def test_number_of_seeds_per_map_is_binomial(monkeypatch: pytest.MonkeyPatch, rate: float) -> None:
    monkeypatch.setattr(drawing, "_sparse", lambda *_: True)
    blocks = Blocks(100, 100, (14, 12), (7, 5))
    places = math.prod(blocks.valid)
    seeds, _ = drawing.draw_blocks(torch.ones(100, 100, 14, 12), blocks, rate, 0.5, None)
    assert seeds.dtype == torch.int32
    seen = np.bincount(np.bincount(seeds.unique().numpy() // places, minlength=10_000), minlength=places + 1)
    assert fit(seen, scipy.stats.binom.pmf(np.arange(places + 1), places, rate)) > MIN_P_VALUE


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.97])
@pytest.mark.parametrize(
    ("sizes", "edges"), [((9, 9), (3, 3)), ((6, 11), (4, 5)), ((7, 7), (7, 7)), ((30,), (7,)), ((5, 4, 6), (2, 3, 2))]
)
@pytest.mark.parametrize("method", METHODS)
def test_drop_probability_of_each_position(method: str, sizes: Sizes, edges: Sizes, p: float) -> None:
    """1 - (1 - gamma)^n at corners, at edges and inside, where n seeds reach the position.

    Binomial over 10,000 maps: within almost 5 standard errors everywhere (1e-6).
    """
    expected = 1 - (1 - gamma_for(sizes, edges, p)) ** reach(sizes, edges)
    found = masks(method, 100, 100, sizes, p, edges).sum((0, 1)).numpy()
    assert (scipy.stats.binom.cdf(found, 10_000, expected.numpy()) > 1e-6).all()
    assert (scipy.stats.binom.sf(found - 1, 10_000, expected.numpy()) > 1e-6).all()
    assert expected.mean() == pytest.approx(p, abs=1e-9)


@pytest.mark.parametrize("p", [0.1, 0.6])
@pytest.mark.parametrize("method", METHODS)
def test_maps_are_independent(method: str, p: float) -> None:
    """The dropped fractions of adjacent channels, of adjacent samples, and across the border of samples."""
    drawn = masks(method, 200, 200, (6, 7), p, (3, 2))
    quarters = drawn.flatten(2).double().mean(2)
    counts = torch.bucketize(quarters, quarters.flatten().quantile(torch.tensor([0.25, 0.5, 0.75]).double()).unique())
    counts = counts.numpy()
    assert independent(counts[:, 0::2].flatten(), counts[:, 1::2].flatten()) > MIN_P_VALUE
    assert independent(counts[:, 1:-1:2].flatten(), counts[:, 2::2].flatten()) > MIN_P_VALUE
    assert independent(counts[0::2].flatten(), counts[1::2].flatten()) > MIN_P_VALUE
    assert independent(counts[:-1, -1], counts[1:, 0]) > MIN_P_VALUE
    corner, center = (drawn[:, :, at, at].numpy().astype(int) for at in (0, 3))
    assert independent(corner[:, 0::2].flatten(), center[:, 1::2].flatten()) > MIN_P_VALUE


@pytest.mark.parametrize("method", METHODS)
def test_positions_farther_apart_than_a_block_are_independent(method: str) -> None:
    """Inside a map, and across line ends. Positions within one block are dependent."""
    drawn = masks(method, 100, 200, (6, 7), 0.4, (3, 2)).flatten(0, 1).numpy().astype(int)
    assert independent(drawn[:, 1, 2], drawn[:, 4, 2]) > MIN_P_VALUE
    assert independent(drawn[:, 2, 6], drawn[:, 3, 0]) > MIN_P_VALUE
    assert independent(drawn[:, 2, 2], drawn[:, 2, 4]) > MIN_P_VALUE
    assert independent(drawn[:, 2, 2], drawn[:, 2, 3]) < MIN_P_VALUE / 100


@pytest.mark.parametrize(
    ("p", "bias", "count"), [(1e-4, 3e-5, 8), (0.003, 2e-4, 4), (0.1, 1e-3, 4), (0.5, 1e-3, 8), (0.97, 1e-3, 8)]
)
@pytest.mark.parametrize("method", METHODS)
def test_long_runs_are_unbiased(method: str, p: float, bias: float, count: int) -> None:
    """Over 10 or 20 million elements: less than `bias`, which is at least three standard errors."""
    run = lambda: masks(method, 16, 200, (28, 28), p, (3, 3)).flatten(2).float().mean(2).double().flatten()
    fractions = torch.cat([run() for _ in range(count)])
    error = (fractions.std() / math.sqrt(len(fractions))).item()
    assert error < bias / 3
    assert abs(fractions.mean().item() - p) < min(bias, 4 * error)


def test_each_drawing_method_is_actually_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forced methods return seeds or a mask."""
    settings = torch.ones(4, 5, 12, 12), Blocks(4, 5, (12, 12), (3, 3)), 0.1, 0.5, None
    monkeypatch.setattr(drawing, "_sparse", lambda *_: False)
    assert drawing.draw_blocks(*settings)[0].dtype == torch.bool
    monkeypatch.setattr(drawing, "_sparse", lambda *_: True)
    seeds, _ = drawing.draw_blocks(*settings)
    assert len(seeds) == len(seeds.unique())
    monkeypatch.setattr(drawing, "must_avoid_sync", lambda _: True)
    assert drawing.draw_blocks(*settings)[0].dtype == torch.bool

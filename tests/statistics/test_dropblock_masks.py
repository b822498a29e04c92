"""DropBlock's masks as a whole are those of the plain algorithm, whichever way they were drawn.

Three ways of drawing, each forced where the library would take another, against brute force: a float64 random number
for each place, and blocks painted around those below gamma. A statistic's p-value fails under `LEAST`; with the seed
of conftest.py the outcome is fixed. The brute force passes the same tests, and wrong rates fail them.
"""

from __future__ import annotations

import itertools
import math

import hypothesis.strategies as st
import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from torch import Tensor

from hookdrop.functional import drop_block
from hookdrop.kernels import drawing
from hookdrop.kernels.blocks import Blocks
from hookdrop.kernels.drawing import Seeded
from hookdrop.kernels.seed_rate import gamma_for

LEAST = 1e-4


WAYS = ["sparse", "static", "dense", "static dense", "brute force"]
"""Only the seeds are drawn; so many of them as depend on the shape alone; a trial for each place."""


def by_brute_force(samples: int, channels: int, sizes: tuple[int, ...], p: float, edges: tuple[int, ...]) -> Tensor:
    """Bool (samples, channels, *sizes), True where dropped."""
    valid = [size - edge + 1 for size, edge in zip(sizes, edges, strict=True)]
    seeds = torch.rand(samples, channels, *valid, dtype=torch.float64) < gamma_for(sizes, edges, p)
    dropped = torch.zeros(samples, channels, *sizes, dtype=torch.bool)
    for steps in itertools.product(*map(range, edges)):
        window = dropped
        for axis, (step, count) in enumerate(zip(steps, valid, strict=True), start=2):
            window = window.narrow(axis, step, count)
        window |= seeds
    return dropped


def masks(
    way: str,
    samples: int,
    channels: int,
    sizes: tuple[int, ...],
    p: float,
    edges: tuple[int, ...],
    shared: bool = False,
) -> Tensor:
    """The same, drawn by `drop_block` in one way."""
    if way == "brute force":
        return by_brute_force(samples, 1 if shared else channels, sizes, p, edges).expand(-1, channels, *sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Seeded, "_sparse", lambda *_: "dense" not in way)
        if "static" in way:
            patch.setattr(drawing, "must_not_wait", lambda _: True)
        x = torch.ones(samples, channels, *sizes)
        return drop_block(x, p, edges, normalize=None, channel_dim=1, per_channel=not shared) == 0


def codes(maps: Tensor) -> np.ndarray:
    """A number for each map, (samples, channels), that says all of it."""
    bits = 2 ** torch.arange(math.prod(maps.shape[2:]))
    return (maps.flatten(2) * bits).sum(2).numpy()


def fit(seen: np.ndarray, expected: np.ndarray) -> float:
    """The p-value of chi-square; what is expected less than 10 times counts together."""
    rare = expected < 10
    if rare.any():
        seen, expected = np.append(seen[~rare], seen[rare].sum()), np.append(expected[~rare], expected[rare].sum())
    if expected[-1] < 1:
        assert seen[-1] < 10
        seen, expected = seen[:-1], expected[:-1]
    return float(scipy.stats.chisquare(seen, expected * seen.sum() / expected.sum()).pvalue)


def independent(first: np.ndarray, second: np.ndarray) -> float:
    """The p-value of chi-square for a table of two rows of small numbers."""
    table = np.zeros((first.max() + 1, second.max() + 1))
    np.add.at(table, (first, second), 1)
    return float(scipy.stats.chi2_contingency(table).pvalue)


SMALL = [((6,), (3,)), ((3, 3), (2, 2)), ((3, 4), (2, 2)), ((4, 4), (3, 2)), ((2, 3, 2), (1, 2, 2)), ((3, 3), (1, 1))]
"""Maps of so few places that all their seeds' patterns can be gone through."""


def all_masks(sizes: tuple[int, ...], edges: tuple[int, ...], gamma: float) -> dict[int, float]:
    """Every mask's code and its probability: the sum over the seeds' patterns that lead to it."""
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
    """The p-value of the masks' distribution."""
    probabilities = all_masks(sizes, edges, gamma_for(sizes, edges, p))
    numbers = sorted(probabilities)
    found = codes(drawn).flatten()
    seen = np.bincount(found, minlength=numbers[-1] + 1)[numbers]
    assert seen.sum() == len(found), "a mask that no seeds lead to"
    return fit(seen, len(found) * np.array([probabilities[number] for number in numbers]))


@pytest.mark.parametrize("p", [0.05, 0.3, 0.9])
@pytest.mark.parametrize(("sizes", "edges"), SMALL)
@pytest.mark.parametrize("way", WAYS)
def test_every_mask_is_as_likely_as_its_seeds(
    way: str, sizes: tuple[int, ...], edges: tuple[int, ...], p: float
) -> None:
    """All masks of small maps, over 20,000 maps."""
    assert whole_masks(masks(way, 200, 100, sizes, p, edges), sizes, edges, p) > LEAST


@pytest.mark.parametrize("way", WAYS)
def test_every_shared_mask_is_as_likely_as_its_seeds(way: str) -> None:
    drawn = masks(way, 20_000, 3, (3, 4), 0.3, (2, 2), shared=True)
    assert torch.equal(drawn, drawn[:, :1].expand_as(drawn))
    assert whole_masks(drawn[:, :1], (3, 4), (2, 2), 0.3) > LEAST


@pytest.mark.parametrize("wrong", [0.95, 1.05])
def test_a_rate_that_is_off_would_be_seen(wrong: float) -> None:
    """By 5 %, in the distribution of masks and in the fraction that they drop."""
    drawn = by_brute_force(200, 100, (3, 4), 0.3 * wrong, (2, 2))
    assert whole_masks(drawn, (3, 4), (2, 2), 0.3) < LEAST / 100
    fractions = drawn.double().flatten(2).mean(2)
    assert abs(fractions.mean() - 0.3) > 8 * fractions.std() / math.sqrt(fractions.numel())


@pytest.mark.parametrize("p", [0.05, 0.3, 0.8])
@pytest.mark.parametrize("way", WAYS)
def test_how_much_of_a_map_is_dropped(way: str, p: float) -> None:
    """The histogram of the dropped count, over 10,000 maps against brute force's over as many."""
    sizes, edges = (9, 11), (4, 3)
    ours = masks(way, 100, 100, sizes, p, edges).flatten(2).sum(2).flatten().numpy()
    plain = by_brute_force(100, 100, sizes, p, edges).flatten(2).sum(2).flatten().numpy()
    edges_of_bins = np.unique(np.quantile(np.concatenate([ours, plain]), np.linspace(0, 1, 21)[1:-1]))
    table = [
        np.bincount(np.searchsorted(edges_of_bins, counts), minlength=len(edges_of_bins) + 1)
        for counts in (ours, plain)
    ]
    table = np.array(table)[:, np.sum(table, axis=0) > 0]
    assert scipy.stats.chi2_contingency(table).pvalue > LEAST


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("rate", [0.002, 0.02, 0.3])
def test_the_number_of_seeds_in_a_map_is_binomial(monkeypatch: pytest.MonkeyPatch, rate: float, static: bool) -> None:
    monkeypatch.setattr(Seeded, "_sparse", lambda *_: True)
    if static:
        monkeypatch.setattr(drawing, "must_not_wait", lambda _: True)
    blocks = Blocks(100, 100, (14, 12), (7, 5))
    places = math.prod(blocks.valid)
    seeds, _ = Seeded(blocks, rate, 0.5, None).now(torch.ones(100, 100, 14, 12))
    assert seeds.dtype == torch.int32
    seen = np.bincount(np.bincount(seeds.unique().numpy() // places, minlength=10_000), minlength=places + 1)
    assert fit(seen, 10_000 * scipy.stats.binom.pmf(np.arange(places + 1), places, rate)) > LEAST


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.97])
@pytest.mark.parametrize(
    ("sizes", "edges"), [((9, 9), (3, 3)), ((6, 11), (4, 5)), ((30,), (7,)), ((5, 4, 6), (2, 3, 2))]
)
@pytest.mark.parametrize("way", WAYS)
def test_positions_drop_as_often_as_blocks_reach_them(
    way: str, sizes: tuple[int, ...], edges: tuple[int, ...], p: float
) -> None:
    """1 - (1 - gamma)^n at corners, at edges and inside, n the seeds in reach.

    Binomial over 10,000 maps: everywhere within what is nearly 5 standard errors, a matter of 1e-6.
    """
    reach = torch.ones(1, dtype=torch.float64)
    for size, edge in zip(sizes, edges, strict=True):
        along = [sum(corner <= at < corner + edge for corner in range(size - edge + 1)) for at in range(size)]
        reach = reach[..., None] * torch.tensor(along, dtype=torch.float64)
    expected = 1 - (1 - gamma_for(sizes, edges, p)) ** reach[0]
    found = masks(way, 100, 100, sizes, p, edges).sum((0, 1)).numpy()
    assert (scipy.stats.binom.cdf(found, 10_000, expected.numpy()) > 1e-6).all()
    assert (scipy.stats.binom.sf(found - 1, 10_000, expected.numpy()) > 1e-6).all()
    assert expected.mean() == pytest.approx(p, abs=1e-9)


@pytest.mark.parametrize("p", [0.1, 0.6])
@pytest.mark.parametrize("way", WAYS)
def test_maps_know_nothing_of_one_another(way: str, p: float) -> None:
    """How much of one is dropped against the next channel's, the next sample's, and across the border of samples."""
    drawn = masks(way, 200, 200, (6, 7), p, (3, 2))
    quarters = drawn.flatten(2).double().mean(2)
    counts = torch.bucketize(quarters, quarters.flatten().quantile(torch.tensor([0.25, 0.5, 0.75]).double()).unique())
    counts = counts.numpy()
    assert independent(counts[:, 0::2].flatten(), counts[:, 1::2].flatten()) > LEAST
    assert independent(counts[:, 1:-1:2].flatten(), counts[:, 2::2].flatten()) > LEAST
    assert independent(counts[0::2].flatten(), counts[1::2].flatten()) > LEAST
    assert independent(counts[:-1, -1], counts[1:, 0]) > LEAST
    corner, centre = (drawn[:, :, at, at].numpy().astype(int) for at in (0, 3))
    assert independent(corner[:, 0::2].flatten(), centre[:, 1::2].flatten()) > LEAST


@pytest.mark.parametrize("way", WAYS)
def test_positions_that_no_block_reaches_both_know_nothing_of_one_another(way: str) -> None:
    """Inside one map, and at the end of a line and the start of the next; within reach of a block they do."""
    drawn = masks(way, 100, 200, (6, 7), 0.4, (3, 2)).flatten(0, 1).numpy().astype(int)
    assert independent(drawn[:, 1, 2], drawn[:, 4, 2]) > LEAST
    assert independent(drawn[:, 2, 6], drawn[:, 3, 0]) > LEAST
    assert independent(drawn[:, 2, 2], drawn[:, 2, 4]) > LEAST
    assert independent(drawn[:, 2, 2], drawn[:, 2, 3]) < LEAST / 100


@settings(max_examples=40)
@given(
    way=st.sampled_from(WAYS[:4]),
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=3).map(tuple),
    edge=st.integers(1, 9),
    p=st.sampled_from([0.003, 0.02, 0.1, 0.25, 0.5, 0.8, 0.97]),
    shared=st.booleans(),
)
def test_realised_fraction_is_p_whichever_way_is_taken(
    way: str, sizes: tuple[int, ...], edge: int, p: float, shared: bool
) -> None:
    """Within 4 standard errors over 2,000 maps and more."""
    torch.manual_seed(2)
    edges = tuple(min(edge, size) for size in sizes)
    maps = max(2000, 60_000 // math.prod(sizes))
    lead = (maps, 1) if shared else (maps // 100, 100)
    fractions = masks(way, *lead, sizes, p, edges, shared).flatten(2).double().mean(2).flatten()
    # No fraction of a map varies more than one that is all or nothing.
    gamma, total = gamma_for(sizes, edges, p), math.prod(sizes)
    least = math.sqrt(gamma * (1 - gamma)) * math.prod(edges) / total * (1 - p)
    error = max(fractions.std().item(), least) / math.sqrt(len(fractions))
    assert abs(fractions.mean().item() - p) < 4 * error


@pytest.mark.parametrize(("p", "bias"), [(1e-4, 3e-5), (0.003, 2e-4), (0.1, 1e-3), (0.5, 1e-3), (0.97, 1e-3)])
@pytest.mark.parametrize("way", WAYS[:4])
def test_a_long_run_has_no_bias(way: str, p: float, bias: float) -> None:
    """Over 20 million elements: less than `bias`, where the standard error is less than a third of it."""
    runs = [masks(way, 16, 200, (28, 28), p, (3, 3)).flatten(2).float().mean(2).double().flatten() for _ in range(8)]
    fractions = torch.cat(runs)
    error = (fractions.std() / math.sqrt(len(fractions))).item()
    assert error < bias / 3
    assert abs(fractions.mean().item() - p) < min(bias, 4 * error)


def test_each_way_is_the_one_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests above force, seen in what is remembered: seeds, more seeds than there are, or a mask."""
    x, seeded = torch.ones(4, 5, 12, 12), Seeded(Blocks(4, 5, (12, 12), (3, 3)), 0.1, 0.5, None)
    monkeypatch.setattr(Seeded, "_sparse", lambda *_: False)
    assert seeded.now(x)[0].dtype == torch.bool
    monkeypatch.setattr(Seeded, "_sparse", lambda *_: True)
    seeds, _ = seeded.now(x)
    assert len(seeds) == len(seeds.unique())
    monkeypatch.setattr(drawing, "must_not_wait", lambda _: True)
    seeds, _ = seeded.now(x)
    assert len(seeds) > len(seeds.unique())


@pytest.mark.parametrize("way", WAYS[:4])
def test_the_seed_decides(way: str) -> None:
    drawn = []
    for _ in range(2):
        torch.manual_seed(7)
        drawn.append(masks(way, 10, 20, (9, 9), 0.3, (3, 3)))
    assert torch.equal(*drawn)
    assert not torch.equal(drawn[0], masks(way, 10, 20, (9, 9), 0.3, (3, 3)))

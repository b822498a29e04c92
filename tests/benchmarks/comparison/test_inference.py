"""Statistics: metrics against references, coverage of intervals, tests by enumeration; the stored results again."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import log_loss

from comparison.analysis import inference
from comparison.analysis.inference import RunMetric, difference, holm, holm_corrected, minimum_detectable, permutation_p
from comparison.analysis.schema import METRICS, UNCLEAR, ArmSummary, Cell, Difference, Summary
from comparison.run import metrics
from tests.support.programs import ROOT

README = ROOT / "benchmarks" / "README.md"
NUMBERS = st.floats(-50, 50).map(lambda value: round(value, 3))
DIFFERENCES = st.lists(NUMBERS, min_size=2, max_size=9)


def made_scores(seed: int, images: int = 300, classes: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(images, classes, generator=generator)
    return logits, torch.randint(classes, (images,), generator=generator)


def brute_ece(confidences: Sequence[float], correct: Sequence[bool], bins: int) -> float:
    total = 0.0
    for m in range(bins):
        inside = [i for i, c in enumerate(confidences) if m / bins < c <= (m + 1) / bins or (c == m == 0)]
        if inside:
            gap = np.mean([correct[i] for i in inside]) - np.mean([confidences[i] for i in inside])
            total += len(inside) / len(confidences) * abs(gap)
    return 100 * total


class TestMetrics:
    def test_nll_and_accuracy_match_scikit_learn_and_the_stored_scores(self) -> None:
        logits, labels = made_scores(4)
        found = metrics.score(logits, labels)
        assert found.nll == pytest.approx(log_loss(labels, logits.double().softmax(1), labels=range(7)), rel=1e-9)
        assert found.accuracy == pytest.approx(100 * (logits.argmax(1) == labels).double().mean().item())
        assert found.images["nll"].mean() == pytest.approx(found.nll, rel=1e-6)
        assert found.images["confidence"] == pytest.approx(logits.softmax(1).amax(1).numpy(), rel=1e-5)
        assert metrics.ece(found.images["confidence"], found.images["correct"]) == found.ece > 0

    @given(
        st.lists(st.tuples(st.integers(0, 30).map(lambda k: k / 30) | st.floats(0, 1), st.booleans()), min_size=1),
        st.integers(1, 20),
    )
    def test_ece_matches_a_loop_over_bins(self, pairs: list[tuple[float, bool]], bins: int) -> None:
        confidences, correct = (np.array(column) for column in zip(*pairs, strict=True))
        assert metrics.ece(confidences, correct, bins) == pytest.approx(brute_ece(confidences, correct, bins))

    def test_metrics_of_resamples_match_direct_scoring(self) -> None:
        logits, labels = made_scores(7, images=50)
        counts = inference.resamples(50, 20, 1)
        found = inference.resampled(metrics.score(logits, labels).images, counts)
        for b, count in enumerate(counts):
            rows = np.repeat(np.arange(50), count)
            again = metrics.score(logits[rows], labels[rows])
            for metric in ("accuracy", "nll", "ece"):
                assert found[metric][b] == pytest.approx(getattr(again, metric), rel=1e-5), metric

    def test_invalid_logits_raise(self) -> None:
        logits, labels = made_scores(8, images=4)
        logits[2, 1] = torch.nan
        with pytest.raises(FloatingPointError, match="logits of 1 of 4 images are not finite"):
            metrics.score(logits, labels)


DRAWS: dict[str, Callable[[np.random.Generator, Any], Any]] = {
    "normal": lambda rng, size: rng.normal(size=size),
    "skewed": lambda rng, size: rng.exponential(size=size) - 1,
    "log-normal": lambda rng, size: rng.lognormal(size=size) - np.exp(0.5),
}


def bootstrap_t(values: np.ndarray) -> inference.Interval:
    """The bootstrap-t interval of `over_seeds`, before it is limited by the t interval."""
    low, high = inference._limits(inference.resamples(len(values), 2000, 0), values[None], 0.0)
    error = inference.standard_error(values)
    return float(values.mean() - high * error), float(values.mean() - low * error)


def student(values: np.ndarray) -> inference.Interval:
    found = scipy.stats.ttest_1samp(values, 0).confidence_interval(0.95)
    return found.low, found.high


METHODS: dict[str, Any] = {"bootstrap-t": bootstrap_t, "t": student, "ours": inference.over_seeds}


def coverage(method: str, kind: str, seeds: int, times: int) -> float:
    """The percentage of intervals that cover a true mean of 0."""
    rng = np.random.default_rng((seeds, len(kind)))
    found = [METHODS[method](DRAWS[kind](rng, seeds)) for _ in range(times)]
    return 100 * float(np.mean([low <= 0 <= high for low, high in found]))


class TestCoverage:
    """Simulation reproduces the coverages in the README, within 4.5 standard errors."""

    @pytest.mark.parametrize("kind", DRAWS)
    @pytest.mark.parametrize("seeds", [4, 8, 16])
    def test_coverage_over_seeds_matches_the_documented_values(self, kind: str, seeds: int) -> None:
        rows = re.findall(rf"^\| {kind} \| {seeds} \| (.*) \|$", README.read_text(), re.MULTILINE)
        for method, percent in zip(METHODS, map(float, rows[0].split(" | ")[2:]), strict=True):
            bound = 4.5 * (percent * (100 - percent) * (1 / 200 + 1 / 2000)) ** 0.5
            assert coverage(method, kind, seeds, 200) == pytest.approx(percent, abs=bound), method

    @pytest.mark.parametrize("sizes", [(1.0, 1.0, 1.0), (0.1, 2.0, 3.0), (0.02, 4.0, 1.0)])
    @pytest.mark.parametrize("seeds", [4, 8])
    def test_coverage_over_seeds_and_images(self, sizes: tuple[float, float, float], seeds: int) -> None:
        rng, images, times = np.random.default_rng(seeds), 100, 150
        counts_BN = inference.resamples(images, 500, 1)
        both, alone = [], []
        for _ in range(times):
            of_seed, of_image, of_both = sizes
            values_SN = of_seed * rng.normal(size=(seeds, 1)) + of_image * rng.normal(size=images)
            values_SN += of_both * rng.normal(size=(seeds, images))
            both.append(inference.over_both(values_SN.mean(1), values_SN @ counts_BN.T / images))
            alone.append(inference.over_seeds(values_SN.mean(1)))
            assert both[-1][0] <= alone[-1][0] < alone[-1][1] <= both[-1][1]
        # 95 % minus 3.5 standard errors. Intervals over seeds alone undercover if images dominate.
        assert np.mean([low <= 0 <= high for low, high in both]) > 0.95 - 3.5 * (0.95 * 0.05 / times) ** 0.5
        if sizes[0] < 0.1:
            assert np.mean([low <= 0 <= high for low, high in alone]) < 0.7


class TestIntervals:
    @given(DIFFERENCES)
    def test_intervals_contain_the_mean_and_the_t_interval(self, values: list[float]) -> None:
        low, high = inference.over_seeds(values)
        assert low <= np.mean(values) + 1e-9
        assert high >= np.mean(values) - 1e-9
        if inference.standard_error(np.array(values)):
            theirs = student(np.array(values))
            assert low <= theirs[0] + 1e-6
            assert high >= theirs[1] - 1e-6
            assert np.isfinite([low, high]).all()

    def test_one_value_is_a_point_and_two_give_the_t_interval(self) -> None:
        assert inference.over_seeds([0.7]) == inference.over_both([0.7], np.ones((1, 9))) == (0.7, 0.7)
        assert inference.over_seeds([0.7, 1.1]) == pytest.approx(student(np.array([0.7, 1.1])))


class TestPermutation:
    @given(st.lists(st.integers(-4, 4).map(float) | NUMBERS, min_size=2, max_size=8))
    @settings(max_examples=60)
    def test_p_matches_scipys_exact_test(self, values: list[float]) -> None:
        theirs = scipy.stats.permutation_test((values,), np.mean, permutation_type="samples", n_resamples=np.inf)
        assert permutation_p(values) == pytest.approx(theirs.pvalue)

    @pytest.mark.parametrize("pairs", [1, 2, 5, 6, 16, 20])
    def test_smallest_p_is_reached_by_differences_of_one_sign(self, pairs: int) -> None:
        assert permutation_p(np.arange(1, pairs + 1)) == inference.smallest_p(pairs) == 2 / 2**pairs
        assert permutation_p([]) == permutation_p([0.0] * pairs) == 1.0


def test_holm_matches_manual_examples() -> None:
    assert holm([]) == []
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.02, 0.02, 0.9]) == pytest.approx([0.06, 0.06, 0.9])


class TestMinimumDetectable:
    @pytest.mark.parametrize("pairs", [2, 4, 8, 16])
    def test_minimum_detectable_effect_has_80_percent_power(self, pairs: int) -> None:
        """Over 20,000 simulated comparisons, the power is 80 % within 4 standard errors of 0.28 points."""
        values = np.random.default_rng(2).normal(size=pairs)
        effect = minimum_detectable(values)
        assert effect is not None
        runs = np.random.default_rng(3).normal(effect, values.std(ddof=1), size=(20_000, pairs))
        found = scipy.stats.ttest_1samp(runs, 0, axis=1).pvalue <= 0.05
        assert found.mean() == pytest.approx(0.8, abs=4 * 0.0028)


def arm(values: Sequence[float], first: int = 0) -> dict[int, RunMetric]:
    noise = np.random.default_rng(first).normal(0, 0.1, 200)
    return {seed: RunMetric(value, value + noise) for seed, value in enumerate(values, first)}


class TestDifference:
    def test_difference_is_paired_over_common_seeds(self) -> None:
        found = difference(arm([10.0, 20.0, 30.0]), arm([19.0, 28.0, 7.0], first=1))
        assert (found.seeds, found.values, found.mean, found.p_smallest) == ([1, 2], [1.0, 2.0], 1.5, 0.5)
        with pytest.raises(ValueError, match=r"no common seeds: \[0\] and \[1\]"):
            difference(arm([1.0]), arm([1.0], first=1))

    @pytest.mark.parametrize(
        ("values", "verdict"),
        [
            ([1.0, 1.1, 0.9, 1.2, 0.8, 1.0], "above"),
            ([-1.0, -1.1, -0.9, -1.2, -0.8, -1.0], "below"),
            ([-1.0, 1.1, -0.9, 1.2, -0.8, 1.0], UNCLEAR),
            ([1.0, 1.1, 0.9, 1.2, 0.8], UNCLEAR),  # five pairs cannot have a p of 0.05 or less
            # Accuracies on a small test set may be equal: their interval is a point, which is no evidence.
            *(([0.125] * pairs, UNCLEAR if pairs < 6 else "above") for pairs in (1, 2, 4, 5, 6)),
        ],
    )
    def test_verdict_uses_the_interval_over_seeds(self, values: list[float], verdict: str) -> None:
        found = difference(arm(values), {seed: RunMetric(0.0, np.zeros(200)) for seed in range(len(values))})
        assert found.verdict == verdict
        assert (found.mde is None) == (found.seeds_for_half is None) == (len({*values}) == 1)


COMPARISONS = sorted(path.stem for path in (ROOT / "benchmarks" / "configs").glob("*.yaml"))
STORED = [path for name in COMPARISONS if (path := ROOT / "benchmarks" / "results" / name / "summary.json").exists()]
EXACT = ("seeds", "values", "p", "p_smallest", "p_holm", "seeds_for_half", "verdict")
CLOSE = ("mean", "low", "high", "mde")


def cells(path: Path) -> list[Cell]:
    return Summary.model_validate_json(path.read_text()).cells


def runs(arm: ArmSummary, metric: Any) -> dict[int, RunMetric]:
    """The values of an arm. Records of single images are not published, so they are not resampled here."""
    return {seed: RunMetric(value, np.zeros(2)) for seed, value in zip(arm.seeds, arm.values[metric], strict=True)}


def same(found: list[Difference], published: list[Difference]) -> None:
    for ours, theirs in zip(holm_corrected(found), published, strict=True):
        assert {name: getattr(ours, name) for name in EXACT} == {name: getattr(theirs, name) for name in EXACT}
        close = [[getattr(one, name) or 0.0 for name in CLOSE] for one in (ours, theirs)]
        assert close[0] == pytest.approx(close[1], rel=1e-12, abs=1e-12)
        assert theirs.low_images <= ours.low + 1e-12
        assert ours.high <= theirs.high_images + 1e-12


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.parent.name)
def test_differences_from_none_and_between_regularizers(path: Path) -> None:
    for cell in cells(path):
        none, *others = cell.arms
        for metric in METRICS:
            pairs = [(arm, difference(runs(arm, metric), runs(none, metric))) for arm in others if arm.against_none]
            # Controls and references are not corrected.
            families = [[one for one in pairs if one[0].compared], *([one] for one in pairs if not one[0].compared)]
            for family in families:
                same([found for _, found in family], [arm.against_none[metric] for arm, _ in family])
            arms = {arm.name: arm for arm in cell.arms}
            between = [pair for pair in cell.between if pair.metric == metric]
            found = [difference(runs(arms[pair.a], metric), runs(arms[pair.b], metric)) for pair in between]
            same(found, [pair.difference for pair in between])


def test_intervals_over_images_are_those_of_the_published_version() -> None:
    """The records of single images are not published, so these numbers were frozen before the analysis changed."""
    rng = np.random.default_rng(5)
    values = rng.normal(0.8, 1, 16)
    again = values[:, None] + rng.normal(0, 0.7, (16, 1)) * 0.1 + rng.normal(0, 0.6, 2000)
    assert inference.over_both(values, again) == pytest.approx((-0.5193883636054835, 2.0039447789269125), rel=1e-12)

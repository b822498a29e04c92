"""The report: its HTML, its sentences, and the page in a browser."""

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from comparison.analysis import schema
from comparison.analysis.inference import RunMetric, difference, holm_corrected
from comparison.analysis.text import interval_text, sentences, verdict
from comparison.report.page import CellView, render
from tests.benchmarks.comparison.test_inference import STORED
from tests.support.programs import ROOT

HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>\"'&"


class Parsed(HTMLParser):
    """The tags with their attributes, and the text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def all(self, name: str) -> list[str]:
        """All values of an attribute."""
        return [value or "" for _, attributes in self.tags for key, value in attributes.items() if key == name]


def with_names(summary: schema.Summary, name: str) -> schema.Summary:
    """The summary with `name` in place of text that comes from a user."""
    found = summary.model_copy(deep=True)
    found.title = found.command = found.config = name
    cell = found.cells[0]
    cell.title, cell.remarks = name, [name]
    for arm in cell.arms:
        arm.name, arm.call = f"{arm.name} {name}", name
        arm.layers = arm.flags = [name]
        arm.set_aside = {1: name}
    for failure in found.failures:
        failure.cell = failure.arm = failure.message = name
    found.environments = [schema.Environment(runs=1, details={name: {name: name}})]
    return found


def bare(summary: schema.Summary) -> schema.Summary:
    """The summary without optional measurements."""
    found = summary.model_copy(deep=True)
    for arm in found.cells[0].arms:
        arm.tuning = arm.time = arm.memory = arm.against_none = None
        arm.asked = arm.dropped = arm.dropped_half = arm.rate_at_end = None
    nothing: Any = dict.fromkeys(("aa_equal", "aa_seeds", "unchanged", "hooked"), 0)
    found.cells[0].between, found.cells[0].controls = [], schema.Controls(none_none=None, paired=True, **nothing)
    return found


FAILED = schema.FailedRun(cell="c", arm="Dropout", seed=3, stage="final", kind="nan", message="a nan", key="0f")


def stored(study: str = "digits", arms: slice = slice(None)) -> schema.Summary:
    """A stored comparison with a failed run, with some of its arms."""
    path = ROOT / "benchmarks" / "results" / study / "summary.json"
    found = schema.Summary.model_validate_json(path.read_text()).model_copy(update={"failures": [FAILED]})
    found.cells[0].arms = found.cells[0].arms[arms]
    return found


@pytest.fixture(scope="module")
def small() -> schema.Summary:
    return stored(arms=slice(None, None, 4))


@pytest.fixture(scope="module")
def html() -> str:
    summary = stored()
    return render(summary.model_copy(update={"cells": [*summary.cells, *stored("synthetic").cells]}))


class TestHtml:
    def test_page_is_self_contained(self, html: str) -> None:
        parsed = Parsed(html)
        assert not parsed.all("src")
        assert all(target.startswith("#") or target == "data:," for target in parsed.all("href"))
        assert not re.search(r"url\((?!#)|@import|https?:|<script", html)
        assert "default-src 'none'" in parsed.all("content")[-1]

    def test_ids_are_unique_and_references_resolve(self, html: str) -> None:
        ids = Parsed(html).all("id")
        assert len(ids) == len(set(ids))
        used = re.findall(r"url\(#([^)]+)\)", html) + [to[1:] for to in Parsed(html).all("href") if to[0] == "#"]
        assert len(used) > 50
        assert set(used + Parsed(html).all("aria-labelledby")) <= set(ids)

    def test_user_text_is_escaped(self, small: schema.Summary) -> None:
        expected, found = (Parsed(render(with_names(small, name))) for name in ("name", HOSTILE))
        # A name may need another number of lines.
        assert [tag for tag, _ in found.tags if tag != "text"] == [tag for tag, _ in expected.tags if tag != "text"]

    def test_tables_and_figures_are_labeled(self, html: str) -> None:
        tags = Parsed(html).tags
        names = [tag for tag, _ in tags]
        assert names.count("caption") == names.count("table") > 8
        assert all(attributes.get("scope") for tag, attributes in tags if tag == "th")
        assert all(attributes["role"] == "img" and attributes["aria-label"] for tag, attributes in tags if tag == "svg")


class TestContent:
    def test_verdict_picture_and_table_come_first(self, html: str) -> None:
        order = [html.index(part) for part in ('class="verdict"', "<svg", "<table", "<details")]
        assert order == sorted(order)

    def test_arms_are_ranked_by_accuracy_before_the_controls(self, small: schema.Summary) -> None:
        arms = CellView(0, small.cells[0]).arms
        ranks = [(arm.kind == "control", -arm.against_none["accuracy"].mean) for arm in arms if arm.against_none]
        assert ranks == sorted(ranks)

    def test_problems_are_shown_at_the_top(self, small: schema.Summary) -> None:
        wrong = small.model_copy(deep=True)
        wrong.cells[0].controls.aa_equal -= 1
        wrong.environments = wrong.environments[:1] * 2
        top = render(wrong).split("<section")[0]
        for text_ in ("A control failed", "2 different environments", "1 run failed"):
            assert text_ in top
        assert "A control failed" not in render(small)

    @pytest.mark.parametrize("path", STORED, ids=lambda path: path.parent.name)
    def test_stored_reports_are_those_of_their_summaries(self, path: Path) -> None:
        """Other versions of matplotlib draw other paths, so only the text is compared."""
        summary = schema.Summary.model_validate_json(path.read_text())
        stored = path.with_name("report.html").read_text()
        assert path.with_name("report.html").stat().st_size < 1_500_000
        for cell in summary.cells:
            assert "," not in "".join([cell.title, *(arm.name + arm.like for arm in cell.arms)])
            for sentence in (verdict(cell), *sentences(cell, "cautions", "notes", "controls")):
                assert f">{sentence.replace('&', '&amp;')}<" in stored.replace("&#39;", "'").replace("&#34;", '"')


def cell_of(values: dict[str, list[float]]) -> schema.Cell:
    """A cell whose variants have these differences from none, in all metrics."""
    cell, zero = stored(arms=slice(len(values) + 1)).cells[0], dict.fromkeys(range(20), RunMetric(0.0, np.zeros(2)))
    runs = [{seed: RunMetric(one, np.zeros(2)) for seed, one in enumerate(of)} for of in values.values()]
    found = holm_corrected([difference(of, zero) for of in runs])
    for arm, name, one in zip(cell.arms[1:], values, found, strict=True):
        arm.name, arm.against_none = name, dict.fromkeys(schema.METRICS, one)
    return cell


class TestVerdict:
    """The first paragraph, from differences whose sign and size are plain; NLL and ECE have the other sign."""

    @pytest.mark.parametrize(
        ("means", "said"),
        [
            ({"A": 2, "B": 0, "C": -1}, "Of 3 variants, 1 helped accuracy (A by 2.00 points), 1 hurt accuracy (C by 1."),
            ({"A": 2, "B": 3, "C": 0}, "2 helped accuracy (B by 3.00 points and A by 2.00 points) and 1 made no clear"),
            ({"A": 2, "B": 3, "C": 3, "D": 0}, "Of 4 variants, 3 helped accuracy (most B and C, by 3.00 points) and 1"),
            ({"A": 0.01, "B": 0}, "None of the 2 variants made a clear difference to accuracy. No clear difference in"),
            ({"A": -1, "B": -2}, "Both variants hurt accuracy (B by 2.00 points and A by 1.00 points). What got better:"),
            ({"A": 1}, "A helped accuracy by 1.00 points. What got worse: test loss (NLL) (by 1.000 nats) and calib"),
            ({"A": 0}, "A made no clear difference to accuracy."),
        ],
    )  # fmt: skip
    def test_what_helped_hurt_and_is_unclear(self, means: dict[str, float], said: str) -> None:
        noise = np.random.default_rng(0).normal(0, 0.2, 8)
        paragraph = verdict(cell_of({name: [*(mean + noise - noise.mean())] for name, mean in means.items()}))
        assert said in paragraph
        assert "in 8 pairs of runs that share the seed, on 797 test images." in paragraph

    def test_holm_decides_and_not_the_interval(self) -> None:
        """On the digits, five intervals of accuracy exclude 0; one remains after the correction, with all eleven ECEs."""
        page, found = render(stored()), verdict(stored().cells[0])
        assert found.startswith("Of 11 variants, 1 helped accuracy (torchvision.DropBlock2d (equal p) by 0.48 points)")
        assert "What got worse: calibration error (ECE) with all 11 (by up to 2.07 points) and training time" in found
        table = page.partition("Differences from none</summary>")[2].partition("</details>")[0]
        assert (table.count('class="better"'), table.count('class="worse"')) == (1, 11)
        # Filled diamonds, in the wide and the narrow picture.
        assert [page.count(f'"fill: var(--{of}); stroke: var(--{of});') for of in ("good", "bad")] == [2 * 1, 2 * 11]

    @pytest.mark.parametrize(("pairs", "shown"), [(3, "+0.10 [no spread]"), (1, "+0.10 [1 pair]")])
    def test_differences_without_spread_have_no_interval(self, pairs: int, shown: str) -> None:
        cell = cell_of({"A": [0.1] * pairs})
        assert interval_text(cell.arms[1].against_none["accuracy"], "accuracy") == shown
        assert "+0.10, +0.10" not in render(stored().model_copy(update={"cells": [cell]}))

    @pytest.mark.parametrize(
        ("aa", "variant", "said"),
        [(0.8, 0.8, ", calibration error (ECE) and training time."), (1, 0.8, "better: training time (by 20 %)."),
         (0.8, 1.3, "worse: training time (by 30 %).")],
    )  # fmt: skip
    def test_a_time_is_called_beyond_the_noise_of_the_a_a_control(self, aa: float, variant: float, said: str) -> None:
        cell = cell_of({"A": [1.0, 2.0]})
        cell.arms.append(stored().cells[0].arms[-1])
        for arm, at in zip(cell.arms[1:], (variant, aa), strict=True):
            arm.time = schema.Spread(low=at - 0.01, median=at, high=at + 0.01)
        assert said in verdict(cell)

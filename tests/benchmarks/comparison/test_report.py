"""The report: its HTML, and the page in a browser."""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pydantic")
pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")
from comparison.analysis import schema
from comparison.report import arm_styles, numbers, strips, view
from comparison.report.page import render, write
from comparison.spec import tuning
from tests.support import comparison_summaries as summaries

HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>\"'&"


LONG = "a_regularizer_with_a_name_that_does_not_end_" * 6


class Parsed(HTMLParser):
    """The tags with their attributes, the scripts, and the other text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag == "script":
            self.scripts.append("")
        self._open.append(tag)

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "script":
            self.scripts[-1] += data
        else:
            self.texts.append(data)

    def handle_endtag(self, tag: str) -> None:
        self._open.append("")

    def all(self, name: str) -> list[str]:
        """All values of an attribute."""
        return [value or "" for _, attributes in self.tags for key, value in attributes.items() if key == name]


def with_names(summary: schema.Summary, name: str) -> schema.Summary:
    """The summary with `name` in place of all text that comes from a user."""
    found = summary.model_copy(deep=True)
    found.title = found.command = found.config = name
    cell = found.cells[0]
    cell.title = cell.slug = name
    cell.words = [name]
    for arm in cell.arms:
        arm.name = f"{arm.name} {name}"
        arm.call = arm.command = name
        arm.layers = arm.flags = [name]
        arm.set_aside = {1: name}
        for site in arm.realised:
            site.name = name
        if arm.mask:
            arm.mask.site = name
        if arm.tuning:
            arm.tuning = tuning.Tuning(
                method=name,
                space={name: [1, 2]},
                trials=[tuning.Trial(settings={name: 1}, score=None)],
                seeds=[1],
                chosen={name: 1},
                at_edge=[name],
            )
    for between in cell.between:
        between.a, between.b = f"{between.a} {name}", f"{between.b} {name}"
    for failure in found.failures:
        failure.cell = failure.arm = failure.message = name
    found.environments = [schema.Environment(runs=1, details={name: {name: name}})]
    return found


def bare(summary: schema.Summary) -> schema.Summary:
    """The summary without optional measurements."""
    found = summary.model_copy(deep=True)
    nothing = schema.Band(x=[], low=[], median=[], high=[])
    for arm in found.cells[0].arms:
        arm.tuning = arm.time = arm.memory = arm.mask = arm.against_none = None
        arm.asked = arm.dropped = arm.dropped_half = arm.rate_at_end = arm.ramp_end = None
        arm.realised, arm.calibration = [], []
        arm.train_loss = arm.validation_accuracy = arm.validation_nll = arm.rate = nothing
    found.cells[0].between = []
    found.cells[0].controls = schema.Controls(
        aa_equal=0, aa_seeds=0, none_none=None, paired=True, unchanged=0, hooked=0
    )
    return found


@pytest.fixture(scope="module")
def summary() -> schema.Summary:
    return summaries.summary(arms=12, seeds=8)


@pytest.fixture(scope="module")
def html(summary: schema.Summary) -> str:
    return render(summary)


@pytest.fixture(scope="module")
def page(html: str) -> Parsed:
    return Parsed(html)


@pytest.fixture(scope="module")
def small() -> schema.Summary:
    return summaries.summary(arms=4, seeds=3)


@pytest.fixture(scope="module")
def three() -> str:
    return render(summaries.summary(cells=3, arms=4, seeds=3))


class TestHtml:
    def test_page_is_self_contained(self, three: str) -> None:
        parsed = Parsed(three)
        assert not parsed.all("src")
        assert all(target.startswith("#") or target == "data:," for target in parsed.all("href"))
        assert not re.search(r"url\((?!#)|@import|https?:", three)
        assert "default-src 'none'" in parsed.all("content")[-1]

    def test_ids_are_unique_and_references_resolve(self, three: str) -> None:
        parsed = Parsed(three)
        ids = parsed.all("id")
        assert len(ids) == len(set(ids))
        used = [target[1:] for target in parsed.all("href") if target.startswith("#")]
        used += [name for names in parsed.all("aria-labelledby") for name in names.split()]
        used += re.findall(r"url\(#([^)]+)\)", three)
        assert len(used) > 100
        assert set(used) <= set(ids)

    def test_page_embeds_the_summary_as_json(self, summary: schema.Summary, page: Parsed) -> None:
        assert json.loads(page.scripts[0]) == json.loads(summary.model_dump_json())

    def test_nan_and_infinity_are_null_in_json_and_a_dash_in_tables(self) -> None:
        broken = summaries.summary(arms=3, seeds=2)
        arm = broken.cells[0].arms[1]
        assert arm.against_none
        arm.means["nll"] = float("nan")
        arm.against_none["nll"].values[0] = arm.against_none["nll"].high_images = float("inf")
        html = render(broken)
        data = json.loads(Parsed(html).scripts[0], parse_constant=pytest.fail)
        assert data["cells"][0]["arms"][1]["means"]["nll"] is None
        assert not re.search(r'="[^"]*\b(nan|inf)\b', html)

    def test_page_is_deterministic(self, three: str, tmp_path: Path) -> None:
        write(summaries.summary(cells=3, arms=4, seeds=3), tmp_path / "report.html")
        assert (tmp_path / "report.html").read_bytes() == three.encode()

    def test_user_text_is_escaped(self, small: schema.Summary) -> None:
        expected, found = (Parsed(render(with_names(small, name))) for name in ("name", HOSTILE))
        assert [tag for tag, _ in found.tags] == [tag for tag, _ in expected.tags]
        assert json.loads(found.scripts[0])["title"] == HOSTILE

    def test_heading_levels_are_not_skipped(self, page: Parsed) -> None:
        levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h\d", tag)]
        assert levels[0] == 1
        assert levels.count(1) == 1
        assert all(below <= above + 1 for above, below in itertools.pairwise(levels))

    def test_tables_have_captions_and_header_scopes(self, page: Parsed) -> None:
        tags = [tag for tag, _ in page.tags]
        assert tags.count("caption") == tags.count("table") > 8
        assert all(attributes.get("scope") for tag, attributes in page.tags if tag == "th")

    def test_figures_have_a_label_or_are_hidden(self, page: Parsed) -> None:
        pictures = [attributes for tag, attributes in page.tags if tag == "svg"]
        assert len(pictures) > 100
        for attributes in pictures:
            assert attributes.get("aria-hidden") == "true" or (attributes["role"] == "img" and attributes["aria-label"])

    def test_buttons_have_unique_names(self, three: str) -> None:
        names = re.findall(r'<button type="button" class="(?:download|copy)"[^>]*>(.*?)</button>', three)
        assert len(names) == len(set(names)) > 30


class TestContent:
    def text(self, summary: schema.Summary) -> str:
        return re.sub(r"\s+", " ", " ".join(Parsed(render(summary)).texts))

    def test_findings_come_first(self, summary: schema.Summary, page: Parsed) -> None:
        text = "".join(page.texts)
        words = text.index(summary.cells[0].words[0])
        assert text.index("fixed before the first run") < words < text.index("Between regularizers")

    def test_sentence_describes_the_comparison(self, summary: schema.Summary) -> None:
        assert view.sentence(summary) == (
            "5 regularizers, 1 recipe and 3 implementations from other libraries, compared with none in paired training runs with 8 seeds each, "
            "fixed in advance: resnet18 on digits, 100 images."
        )

    def test_missing_measurements_are_stated(self, small: schema.Summary) -> None:
        html = render(bare(small))
        for name in ("between", "calibration", "masks", "cost", "tuning"):
            section = html.split(f'id="cell1-{name}"')[1].split("<h3")[0]
            assert ("<p>Not tuned" if name == "tuning" else "<p>Not measured") in section, name
        assert html.split('id="cell1-curves"')[1].split("<h3")[0].count("<p>Not measured.</p>") == 3
        assert html.split('id="cell1-rates"')[1].split("<h3")[0].count("not measured") == 2
        assert html.split('id="cell1-controls"')[1].split("<h3")[0].count("<strong>Not measured</strong>") == 3

    def test_all_runs_failed(self) -> None:
        text = self.text(
            summaries.summary(cells=0, failures=[summaries.failure("DropBlock", seed) for seed in range(3)])
        )
        assert "no cell has a finished run" in text
        assert "3 runs failed" in text
        assert text.count("the loss was nan at step 211") == 3

    def test_one_seed_has_no_mde(self) -> None:
        one = summaries.summary(arms=4, seeds=1, failures=[])
        html = render(one)
        assert re.search(
            r'data-col="mde" data-sort-accuracy=""[^>]*>.*?<span class="m" data-m="accuracy">–</span>', html
        )
        assert "None: every run has an outcome." in html
        assert "1 seed, fixed" not in html
        assert "with 1 seed each" in html

    def test_different_environments_are_marked(self, small: schema.Summary) -> None:
        assert "different environments" not in self.text(small)
        two = small.model_copy(
            update={"environments": [summaries.environment("8f161cd"), summaries.environment("cd8f161")]}
        )
        assert "The runs used 2 different environments" in self.text(two)
        marked = re.findall(r'class="differs"><th scope="row">(.*?)</th>', render(two))
        assert marked == ["git.revision"] * 2

    def test_a_failed_control_is_shown_at_the_top(self, small: schema.Summary) -> None:
        assert "A control failed" not in self.text(small)
        wrong = small.model_copy(deep=True)
        wrong.cells[0].controls.aa_equal -= 1
        text = self.text(wrong)
        assert text.index("A control failed in resnet18 on digits, 100 images") < text.index("Ranking: each arm")
        assert "2 of 3 seeds" in text

    def test_settings_at_the_edge_of_the_search_space_are_flagged(self, small: schema.Summary) -> None:
        edges = sum(len(arm.tuning.at_edge) for arm in small.cells[0].arms if arm.tuning)
        assert edges
        assert self.text(small).count("at the edge of the search space") == edges

    def test_a_mask_shows_every_dropped_element(self, html: str, summary: schema.Summary) -> None:
        for arm in summary.cells[0].arms:
            if arm.mask:
                dropped = [(x, y) for y, row in enumerate(arm.mask.rows) for x, kept in enumerate(row) if not kept]
                picture = html.split(
                    f'aria-label="{arm.name} at {arm.mask.site}: 14 x 14 map, {len(dropped)} elements dropped"'
                )[1].split("</svg>")[0]
                assert [(int(x), int(y)) for x, y in re.findall(r"M(\d+),(\d+)h1", picture)] == dropped

    @pytest.mark.parametrize(
        ("metric", "verdict", "p_holm", "text"),
        [
            ("accuracy", "above", 0.01, "better than none"),
            ("nll", "above", 0.01, "worse than none"),
            ("nll", "below", 0.01, "better than none"),
            ("ece", "below", 0.05, "better than none, but not after Holm's correction"),
            ("ece", "cannot be distinguished", 0.01, "cannot be distinguished from none"),
        ],
    )
    def test_verdicts_depend_on_the_direction_of_the_metric(
        self, metric: schema.Metric, verdict: Any, p_holm: float, text: str
    ) -> None:
        found = summaries.difference(np.array([1.0, 2.0])).model_copy(update={"verdict": verdict, "p_holm": p_holm})
        assert numbers.verdict(found, metric, "none") == text

    @pytest.mark.parametrize(
        ("p", "text"),
        [(1.0, "1.000"), (0.0312, "0.031"), (2 / 65536, "3.1e−5"), (2e-12, "2.0e−12"), (float("nan"), "–")],
    )
    def test_small_probabilities_keep_two_digits(self, p: float, text: str) -> None:
        assert numbers.probability(p) == text

    @pytest.mark.parametrize(
        ("created", "text"),
        [
            ("2024-05-17T09:30:00", "2024-05-17 09:30 UTC"),
            ("2024-05-17T09:30:00+02:00", "2024-05-17 07:30 UTC"),
            ("today", "today"),
        ],
    )
    def test_times_are_in_utc(self, created: str, text: str) -> None:
        assert numbers.moment(created) == text


class TestStrips:
    def test_axis_contains_all_values(self, summary: schema.Summary) -> None:
        for arm in summary.cells[0].arms[1:]:
            assert arm.against_none
            found = arm.against_none["nll"]
            axis = strips.axis_of([found])
            for value in (0.0, *found.values, found.low, found.high, found.low_images, found.high_images):
                assert strips.EDGE <= float(axis.at(value)) <= strips.WIDTH - strips.EDGE

    def test_axis_of_a_single_value_has_a_width(self) -> None:
        axis = strips.Axis.of([0.0])
        assert axis.low < 0 < axis.high
        assert float(axis.at(0)) == strips.WIDTH / 2

    def test_arm_styles_are_unique(self, summary: schema.Summary) -> None:
        found = arm_styles.arm_styles(summary.cells[0].arms * 10)
        assert len(set(found[1:12])) == 11
        assert len({style for style in found if style.color}) == 110


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One Chromium for all tests."""
    playwright = pytest.importorskip("playwright.sync_api")
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if not found:
        pytest.skip("no Chromium: install it (Debian: apt-get install chromium) to see the report in a browser")
    with playwright.sync_playwright() as running:
        chromium = running.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield chromium
        chromium.close()


Show = Callable[..., Any]


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Show]:
    """Open a summary in the browser. Console messages, errors and requests fail the test."""
    noise: list[str] = []
    contexts = []

    def opened(shown: schema.Summary | str, **options: Any) -> Any:
        file = tmp_path / "report.html"
        file.write_text(shown if isinstance(shown, str) else render(shown), encoding="utf-8")
        contexts.append(browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options}))
        tab = contexts[-1].new_page()
        tab.on("console", lambda message: noise.append(f"{message.type}: {message.text}"))
        tab.on("pageerror", lambda error: noise.append(str(error)))
        tab.on(
            "request",
            lambda request: (
                noise.append(request.url) if not request.url.startswith(("file:", "blob:", "data:,")) else None
            ),
        )
        tab.goto(file.as_uri())
        return tab

    yield opened
    for context in contexts:
        context.close()
    assert not noise


def names(tab: Any, body: int = 0) -> list[str]:
    """The names of the visible arms of the ranking, in order."""
    return tab.evaluate(
        f"[...document.querySelector('.ranking').tBodies[{body}].querySelectorAll('tr:not(.group)')].filter(row => !row.hidden)"
        ".map(row => row.querySelector('.name').textContent)"
    )


def header(tab: Any, name: str) -> Any:
    return tab.locator(".ranking th", has=tab.get_by_role("button", name=name, exact=True))


def contrasts(tab: Any) -> dict[str, float]:
    """The lowest contrast of each kind of text, by the WCAG formula on the computed colors."""
    return tab.evaluate(
        """() => {
        const rgb = text => text.match(/[\\d.]+/g).map(Number);
        const light = text => { const [r, g, b] = rgb(text).map(v => (v /= 255) <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
            return .2126 * r + .7152 * g + .0722 * b; };
        const ground = e => { while (e) { const c = getComputedStyle(e).backgroundColor; if ((rgb(c)[3] ?? 1) > 0) return c; e = e.parentElement; } };
        const found = {};
        for (const e of document.querySelectorAll('body *')) {
            if (!e.checkVisibility() || ['SCRIPT', 'STYLE'].includes(e.tagName)) continue;
            if (![...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim())) continue;
            const style = getComputedStyle(e), a = light(e.closest('svg') ? style.fill : style.color), b = light(ground(e));
            const key = e.tagName.toLowerCase() + (e.classList.length ? '.' + e.classList[0] : '');
            found[key] = Math.min(found[key] ?? 99, (Math.max(a, b) + .05) / (Math.min(a, b) + .05));
        }
        return found; }"""
    )


class TestBrowser:
    def test_click_sorts_and_announces_the_order(self, show: Show, html: str, summary: schema.Summary) -> None:
        tab = show(html)
        assert header(tab, "Arm − none").get_attribute("aria-sort") == "descending"
        means = {arm.name: arm.means["nll"] for arm in summary.cells[0].arms if arm.kind != "control"}
        for direction in ("ascending", "descending"):
            tab.get_by_role("button", name="NLL, nats", exact=True).click()
            assert header(tab, "NLL, nats").get_attribute("aria-sort") == direction
            assert names(tab) == sorted(means, key=lambda name: means[name], reverse=direction == "descending")
        assert tab.locator(".ranking th[aria-sort=ascending], .ranking th[aria-sort=descending]").count() == 1
        assert set(names(tab, body=1)) == {"A/A: DropBlock(p=0)", "none, other seeds"}
        assert tab.get_by_role("status").text_content() == "Sorted by NLL, nats, descending."

    def test_rows_without_a_value_are_sorted_last(self, show: Show, html: str) -> None:
        tab = show(html)
        for _ in range(2):
            tab.get_by_role("button", name="Verdict").first.click()
            assert names(tab)[-1] == "none"

    def test_filters_by_text_and_kind_and_announces_the_count(self, show: Show, html: str) -> None:
        tab = show(html)
        tab.get_by_label("Filter").fill("dropblock EQUAL")
        assert sorted(names(tab)) == ["torchvision DropBlock, equal fraction", "torchvision DropBlock, equal p"]
        assert not tab.get_by_text("Controls: these should not differ").is_visible()
        assert tab.get_by_role("status").text_content() == "2 of 12 arms shown."
        tab.get_by_label("Filter").fill("")
        tab.get_by_label("peer").uncheck()
        assert len(names(tab)) == 7
        assert tab.get_by_role("status").text_content() == "9 of 12 arms shown."

    def test_selecting_a_metric_updates_the_ranking_and_plots(
        self, show: Show, html: str, summary: schema.Summary
    ) -> None:
        tab = show(html)
        cell = view.CellView(0, summary.cells[0])
        for metric, better in schema.BETTER.items():
            tab.locator(f"input[value={metric}]").check()
            found = {
                arm.name: arm.against_none[metric]
                for arm in summary.cells[0].arms
                if arm.against_none and arm.kind != "control"
            }
            means = {"none": 0.0, **{name: difference.mean for name, difference in found.items()}}
            assert names(tab) == sorted(means, key=lambda name: -better * means[name])
            assert header(tab, "Arm − none").get_attribute("aria-sort") == ("descending" if better > 0 else "ascending")
            row = tab.locator(".ranking tbody tr", has_text="GaussianNoise")
            dots = row.locator("circle:visible").evaluate_all("dots => dots.map(dot => dot.getAttribute('cx'))")
            assert dots == [cell.axes[metric].at(value) for value in found["GaussianNoise"].values]
            assert tab.locator(".between circle:visible").count() == 8 * len(cell.pairs)

    def test_arms_can_be_hidden_in_the_figures(self, show: Show, html: str) -> None:
        tab = show(html)
        lines = tab.locator(
            "#cell1-train_loss-arm1-line, #cell1-train_loss-arm1-band, #cell1-rate-arm1-line, #cell1-calibration-arm1-count"
        )
        visible = "lines => lines.map(line => getComputedStyle(line).display !== 'none')"
        buttons = tab.locator(".legend [data-arm='1']")
        assert lines.evaluate_all(visible) == [True] * 4
        buttons.first.click()
        assert lines.evaluate_all(visible) == [False] * 4
        assert buttons.evaluate_all("buttons => buttons.map(button => button.ariaPressed)") == ["false"] * 3
        assert tab.locator("#cell1-train_loss-arm2-line").evaluate("line => getComputedStyle(line).display") == "inline"
        tab.get_by_role("button", name="Show all").first.click()
        assert lines.evaluate_all(visible) == [True] * 4

    def test_downloads_contain_their_data(self, show: Show) -> None:
        made = with_names(summaries.summary(arms=5, seeds=3), 'a, "b"\n')
        files = {}
        # Chromium blocks more than ten downloads of a page within a second.
        for half in (0, 1):
            tab = show(made)
            for button in tab.locator(".download").all()[half::2]:
                with tab.expect_download(timeout=5000) as download:
                    button.click()
                name = download.value.suggested_filename
                files[button.get_attribute("data-table")] = (name, Path(download.value.path()).read_bytes())
        assert len(files) == 13
        assert json.loads(files["summary"][1]) == json.loads(made.model_dump_json())
        arms = made.cells[0].arms
        assert json.loads(files["masks"][1]) == [{"arm": arm.name, **arm.mask.model_dump()} for arm in arms if arm.mask]
        rows = {
            name: list(csv.DictReader(io.StringIO(data.decode(), newline="")))
            for name, (file, data) in files.items()
            if file.endswith(".csv")
        }
        assert len(rows) == 11
        assert all(rows.values())
        assert [(row["arm"], row["metric"], float(row["arm_mean"])) for row in rows["ranking"]] == [
            (arm.name, metric, arm.means[metric]) for arm in arms for metric in schema.METRICS
        ]
        differences = [(arm.against_none or {}).get(metric) for arm in arms for metric in schema.METRICS]
        assert [row["p_holm"] and float(row["p_holm"]) for row in rows["ranking"]] == [
            found.p_holm if found else "" for found in differences
        ]
        assert [float(row["value"]) for row in rows["seeds"]] == [
            value for arm in arms for metric in schema.METRICS for value in arm.values[metric]
        ]
        assert [float(row["difference"]) for row in rows["seeds"] if row["difference"]] == [
            value for found in differences if found for value in found.values
        ]
        assert [float(row["median"]) for row in rows["validation_nll"]] == [
            value for arm in arms for value in arm.validation_nll.median
        ]
        assert [int(row["count"]) for row in rows["calibration"]] == [
            bin.count for arm in arms for bin in arm.calibration
        ]
        assert files["ranking"][0] == "a-b-ranking.csv"

    def test_page_can_be_used_with_the_keyboard(self, show: Show, html: str) -> None:
        tab = show(html)
        focused = "document.activeElement.textContent.trim() || document.activeElement.value"
        tab.keyboard.press("Tab")
        assert tab.evaluate(focused) == "Skip to the findings"
        assert tab.locator(".skip").bounding_box()["y"] >= 0
        tab.keyboard.press("Enter")
        assert tab.evaluate("document.activeElement.id") == "main"
        seen: list[str] = []
        while not seen or not seen[-1].startswith("Verdict"):
            tab.keyboard.press("Tab")
            seen.append(tab.evaluate(focused))
            assert tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none", seen[-1]
            assert len(seen) < 60, seen
        assert "accuracy" in seen
        tab.keyboard.press("Enter")
        assert header(tab, "Verdict").get_attribute("aria-sort") == "ascending"
        tab.locator("input[value=accuracy]").focus()
        tab.keyboard.press("ArrowRight")
        assert tab.locator(".cell").get_attribute("data-metric") == "nll"
        # Scrollable regions can be scrolled with the keyboard.
        assert tab.locator(".scroll:not([tabindex='0']), pre:not([tabindex='0'])").count() == 0

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_text_has_enough_contrast(self, show: Show, scheme: str) -> None:
        tab = show(
            summaries.summary(
                arms=4, seeds=2, environments=[summaries.environment(), summaries.environment("another")]
            ),
            color_scheme=scheme,
        )
        tab.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
        tab.locator(".arm").first.click()
        paper = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (paper == "rgb(255, 255, 255)") == (scheme == "light")
        found = contrasts(tab)
        assert {
            "p",
            "a",
            "span.note",
            "strong.flag",
            "text",
            "button.sort",
            "p.notice",
            "code",
            "caption",
        } <= found.keys() | {"caption"}
        assert {name: ratio for name, ratio in found.items() if ratio < 4.5} == {}
        lines = tab.evaluate(
            "[...Array(8).keys()].map(i => { const e = document.createElement('i'); e.style.color = `var(--arm-${i})`; document.body.append(e);"
            "return getComputedStyle(e).color.match(/[\\d.]+/g).map(Number); })"
        )
        assert min(_contrast(line, (255, 255, 255) if scheme == "light" else (20, 23, 26)) for line in lines) >= 3

    def test_the_theme_button_switches_colors(self, show: Show, html: str) -> None:
        tab = show(html, color_scheme="dark")
        paper = "getComputedStyle(document.body).backgroundColor"
        dark = tab.evaluate(paper)
        tab.get_by_role("button", name="Light colors").click()
        assert tab.evaluate(paper) == "rgb(255, 255, 255)"
        tab.get_by_role("button", name="Dark colors").click()
        assert tab.evaluate(paper) == dark

    @pytest.mark.parametrize("name", ["", LONG], ids=["short-names", "long-names"])
    def test_no_horizontal_scrolling_and_readable_text_on_a_phone(
        self, show: Show, html: str, small: schema.Summary, name: str
    ) -> None:
        tab = show(
            with_names(small, name) if name else html,
            viewport={"width": 360, "height": 740},
        )
        tab.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
        assert tab.evaluate("document.documentElement.scrollWidth") <= 360
        little = tab.evaluate(
            """[...document.querySelectorAll('body *')].filter(e => e.checkVisibility() && [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()))
            .map(e => [e.tagName, parseFloat(getComputedStyle(e).fontSize) * (e.tagName === 'text' ? Math.hypot(e.getScreenCTM().a, e.getScreenCTM().b) : 1)]).filter(([_, size]) => size < 13.99)"""
        )
        assert little == []

    def test_script_in_names_is_not_executed(self, show: Show, small: schema.Summary) -> None:
        tab = show(with_names(small, HOSTILE))
        assert tab.evaluate("window.hacked") is None
        assert tab.locator("h1").text_content() == HOSTILE
        assert tab.locator(".ranking .name").first.text_content().endswith(HOSTILE)
        tab.get_by_role("button", name="NLL, nats", exact=True).click()
        assert tab.evaluate("window.hacked") is None

    def test_content_security_policy_blocks_other_scripts(self, browser: Any, tmp_path: Path, html: str) -> None:
        file = tmp_path / "report.html"
        file.write_text(html.replace("</body>", "<script>window.hacked = 1</script></body>"), encoding="utf-8")
        context = browser.new_context()
        tab = context.new_page()
        tab.goto(file.as_uri())
        assert tab.evaluate("window.hacked") is None
        assert tab.locator("#theme").text_content() == "Dark colors"
        context.close()

    def test_cells_are_independent_and_listed_in_the_contents(self, show: Show, three: str) -> None:
        tab = show(three)
        assert tab.get_by_role("navigation").get_by_role("link", name=re.compile("^resnet18 on")).count() == 3
        tab.locator("#cell2 input[value=ece]").check()
        assert tab.locator(".cell").evaluate_all("cells => cells.map(cell => cell.dataset.metric)") == [
            "accuracy",
            "ece",
            "accuracy",
        ]
        with tab.expect_download() as download:
            tab.locator("#cell3 .download[data-table=cost]").click()
        assert download.value.suggested_filename == "resnet18-synthetic-cue-100-2-cost.csv"

    @pytest.mark.parametrize("what", ["bare", "one seed", "failures only"])
    def test_partial_summaries_cause_no_console_errors(self, show: Show, small: schema.Summary, what: str) -> None:
        made = {
            "bare": lambda: bare(small),
            "one seed": lambda: summaries.summary(arms=4, seeds=1),
            "failures only": lambda: summaries.summary(cells=0),
        }
        tab = show(made[what]())
        for button in tab.locator(".sort, .download[data-table=ranking], .download[data-table=seeds]").all():
            button.click()
        assert tab.locator("h1").is_visible()

    def test_accuracy_is_shown_without_javascript(self, show: Show, html: str) -> None:
        tab = show(html, java_script_enabled=False)
        assert tab.locator("noscript p").is_visible()
        assert tab.locator(".ranking [data-m=accuracy] circle").first.is_visible()
        assert not tab.locator(".ranking [data-m=nll] circle").first.is_visible()

    def test_copy_button_copies_the_command(self, show: Show, html: str, summary: schema.Summary) -> None:
        tab = show(html)
        command = tab.locator(".arms .command").nth(1)
        command.get_by_role("button").click()
        tab.wait_for_function("document.getElementById('status').textContent")
        said = tab.get_by_role("status").text_content()
        assert said in ("Copied.", "Selected: press the copy shortcut.")
        copied = "navigator.clipboard.readText()" if said == "Copied." else "getSelection().toString()"
        if said == "Copied.":
            tab.context.grant_permissions(["clipboard-read"])
        assert tab.evaluate(copied) == summary.cells[0].arms[1].command

    def test_reduced_motion_and_print_styles(self, show: Show, html: str) -> None:
        tab = show(html, reduced_motion="reduce", color_scheme="dark")
        assert tab.evaluate("getComputedStyle(document.documentElement).scrollBehavior") == "auto"
        tab.emulate_media(media="print")
        assert not tab.get_by_role("navigation").is_visible()
        assert not tab.locator(".tools").is_visible()
        assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


def _contrast(one: Any, other: Any) -> float:
    def light(color: Any) -> float:
        r, g, b = (
            (value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4)
            for value in (part / 255 for part in color[:3])
        )
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    low, high = sorted((light(one), light(other)))
    return (high + 0.05) / (low + 0.05)

"""The blocks of the README and of every page run in order and print the documented output; links resolve; readers can use them."""

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.support.code_blocks import blocks_of, matches, run
from tests.support.programs import ROOT

README = ROOT / "README.md"
BENCHMARKS = ROOT / "benchmarks" / "README.md"  # a part of docs/evidence/comparison.md
PAGES = sorted(page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts)

NOT_IN_DEV = {
    "composer": "requires PyTorch 2.6 or 2.7.0",
    "mlflow": "takes 90 MB",
    "ultralytics": "takes 380 MB",
    "wandb": "takes 75 MB",
}
"""Libraries that the `dev` extra leaves out, and the reason. Their pages run where they are installed."""


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.fixture
def restored() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.compiler.reset()


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize(
    "page", [README, *(page for page in PAGES if any(block.kind == "code" for block in blocks_of(page)))], ids=name_of
)
def test_blocks_run_and_print_their_output(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in re.findall(r"^<!-- requires: (.*) -->$", page.read_text(), re.M):
        for library in text.split(", "):
            pytest.importorskip(library, reason=reason_for(library), exc_type=ImportError)
    monkeypatch.chdir(tmp_path)
    # The README prints the same on every machine: too much is drawn for the digits shown to differ.
    if missing := sorted(run(page, 0.0 if page == README else 0.03)):
        pytest.skip("all other blocks passed; " + "; ".join(map(reason_for, missing)))


def reason_for(library: str) -> str:
    """Why the blocks that require a library are skipped."""
    detail = f" (not in the dev extra: {NOT_IN_DEV[library]})" if library in NOT_IN_DEV else ""
    return f"{library} is not installed{detail}"


@pytest.mark.parametrize("page", [README, *PAGES], ids=name_of)
def test_links_to_files_and_headings_resolve(page: Path) -> None:
    text = prose(page)
    for target, anchor in re.findall(r"\]\((?!http|#)([^)#\s]+)(#[^)]+)?\)", text):
        other = page.parent / target
        assert other.exists(), target
        assert not anchor or anchor[1:] in headings(other), target + anchor
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= headings(page)


@pytest.mark.parametrize("page", [README, *PAGES], ids=name_of)
def test_named_tests_exist(page: Path) -> None:
    """`unit/test_file.py::test_name`; a name without a file is in the file named before."""
    file, text = "", page.read_text()
    assert all((ROOT / path).exists() for path in re.findall(r"`(tests/[\w/]+\.py)", text))
    for path, name in re.findall(r"([\w/]+\.py)?::(\w+)", text):
        file = path.removeprefix("tests/") or file
        if file.startswith(("unit/", "integration/", "statistics/")):
            source = (ROOT / "tests" / file).read_text()
            assert re.search(rf"^\s*(def|class) {name}\b", source, re.MULTILINE), f"{file}::{name}"


def test_every_row_about_robustness_names_a_test() -> None:
    rows = re.findall(r"^\| (?!trap ).*", (ROOT / "docs" / "robustness.md").read_text(), re.M)
    assert len(rows) > 50
    assert not [row for row in rows if "::" not in row]


def headings(page: Path) -> set[str]:
    titles = re.findall(r"^##* (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize(
    ("printed", "documented", "equal"),
    [("p 0.101\n", "p 0.100\n", True), ("p 0.2", "p 0.1", False), ("q 1", "p 1", False), ("p 1 2", "p 1", False)],
)
def test_output_comparison_detects_differences(printed: str, documented: str, equal: bool) -> None:
    assert matches(printed, documented) is equal


def test_a_failing_block_names_its_page_and_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n```python\nx = 1\nx / 0\n```\n")
    with pytest.raises(ZeroDivisionError) as caught:
        run(page)
    assert (caught.traceback[-1].path, caught.traceback[-1].lineno + 1) == (page, 5)
    page.write_text("```python\nprint(1)\n```\n\n```text\n2\n```\n")
    with pytest.raises(AssertionError, match=r"page.md, line 6 documents\n2\n\nbut the code prints\n1"):
        run(page)


def test_blocks_that_require_a_missing_library_are_left_out_with_their_output(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    block = "```python\nprint(1)\n```\n\n```text\n{}\n```\n"
    page.write_text("<!-- the next block requires: no_such_library -->\n\n" + block.format(2) + block.format(1))
    assert run(page) == {"no_such_library"}
    page.write_text("<!-- the next block requires: torch -->\n\n" + block.format(2))
    with pytest.raises(AssertionError, match="line 8 documents\n2"):
        run(page)


def test_readme_fits_on_a_few_screens_and_starts_with_a_program_and_its_output() -> None:
    text = README.read_text()
    assert text.count("\n") <= 120
    assert "pip install ." in "\n".join(text.splitlines()[:10])
    assert [block.kind for block in blocks_of(README)][:2] == ["code", "text"]


def prose(page: Path) -> str:
    """The text of a page without its code blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)


@pytest.mark.parametrize("page", [README, *PAGES], ids=name_of)
def test_pages_work_with_a_screen_reader_and_offline(page: Path) -> None:
    """Headings start with one title and skip no level; pictures are local and have texts; columns have headers."""
    levels = [len(marks) for marks in re.findall(r"^(#+) ", prose(page), re.M)]
    assert levels[:1] in ([1], [])  # a page that only includes another one has none
    assert levels.count(1) <= 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    pictures = dict(re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", prose(page)))
    assert len(pictures) == prose(page).count("![")
    assert "" not in pictures
    assert not [path for path in pictures.values() if "//" in path]
    assert "<img" not in prose(page)
    headers = re.findall(r"^(\|.*\|)\n\|(?:-+\|)+$", prose(page), re.M)
    assert not [header for header in headers if re.search(r"\|\s*\|", header)]


LIMIT = 33_000
"""Words of prose on all pages outside docs/errors and docs/project, README included."""


def words(text: str) -> int:
    """The words outside fenced code, `{eval-rst}` blocks and comments; those of tables count."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    return len(re.sub(r"^(`{3,}).*?^\1$", "", text, flags=re.M | re.S).split())


def test_prose_stays_short() -> None:
    counted = [README, *(page for page in PAGES if page.relative_to(ROOT).parts[1] not in ("errors", "project"))]
    lengths = {name_of(page): words(page.read_text()) for page in counted}
    longest = sorted(lengths.items(), key=lambda item: -item[1])[:10]
    assert sum(lengths.values()) <= LIMIT, f"shorten these first: {longest}"


WIDTH = 88  # columns: wider code scrolls in a window of 1400 pixels
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.M | re.S)


@pytest.mark.parametrize("page", [README, BENCHMARKS, *PAGES], ids=name_of)
def test_code_fits_beside_the_sidebars(page: Path) -> None:
    wide = []
    for kind, text in FENCE.findall(page.read_text()):
        # The page wraps messages (`none`). The tables that `plan` and `layers` print are as wide as the names in them.
        if kind == "none" or (kind == "text" and re.search(r"^-{3,}  -{3,}", text, re.M)):
            text = "\n".join(line for line in text.splitlines() if kind != "none" and not re.search(r"\S  +\S", line))
            text = re.sub(r"^[- ]+$", "", text, flags=re.M)
        wide += [line for line in text.splitlines() if len(line) > WIDTH]
    assert not wide


def test_tutorials_and_examples_in_docstrings_fit_beside_the_sidebars() -> None:
    lines: list[str] = []
    for path in (ROOT / "examples" / "tutorials").glob("*.py"):
        text = path.read_text()
        code = text.splitlines()[ast.parse(text).body[0].end_lineno :]  # after the text at the head
        lines += [line for line in code if not line.startswith("# ")]
    for path in (ROOT / "hookdrop").rglob("*.py"):
        lines += re.findall(r"^ *((?:>>>|\.\.\.) .*)$", path.read_text(), re.M)
    assert len(lines) > 400
    assert not [line for line in lines if len(line) > WIDTH]


@pytest.mark.parametrize("page", [README, *PAGES], ids=name_of)
def test_what_readers_copy_needs_no_hidden_code(page: Path) -> None:
    """Code in comments only makes logs quiet and checks results."""
    shown: set[str] = set()
    hidden: set[str] = set()
    for block in blocks_of(page):
        names = list(ast.walk(ast.parse(block.text))) if block.kind in ("code", "hidden") else []
        bound = {node.id for node in names if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        bound |= {node.name for node in names if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        imports = [alias for node in names if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names]
        bound |= {(alias.asname or alias.name).partition(".")[0] for alias in imports}
        if block.kind == "hidden":
            hidden |= bound
            continue
        shown |= bound
        used = {node.id for node in names if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        assert not (used & hidden) - shown, f"line {block.line}"

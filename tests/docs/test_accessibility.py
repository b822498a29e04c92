"""Pages work with a screen reader and offline: headings in order, pictures with a text, nothing from other hosts."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.programs import ROOT

PAGES = [ROOT / "README.md", *sorted(p for p in (ROOT / "docs").rglob("*.md") if "_build" not in p.parts)]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def prose(page: Path) -> str:
    """The text of a page without its code blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_headings_start_with_one_title_and_do_not_skip_levels(page: Path) -> None:
    levels = [len(marks) for marks in re.findall(r"^(#+) ", prose(page), re.M)]
    assert levels[:1] in ([1], [])  # a page that only includes another one has none
    assert levels.count(1) <= 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_pictures_have_distinct_alternative_texts_and_are_local(page: Path) -> None:
    pictures = re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", prose(page))
    texts = [text for text, _ in pictures]
    assert all(texts)
    assert len(set(texts)) == len(texts)
    assert not [path for _, path in pictures if "//" in path]
    assert "<img" not in prose(page)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_column_of_a_table_has_a_header(page: Path) -> None:
    headers = re.findall(r"^(\|.*\|)\n\|(?:-+\|)+$", prose(page), re.M)
    assert not [header for header in headers if re.search(r"\|\s*\|", header)]

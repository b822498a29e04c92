"""Every entry of the error catalog raises or warns, and the pages in `docs/errors` say what to do about it, and quote no other."""

import re
from itertools import combinations

import pytest

from tests.support.error_catalog import CASES, messages
from tests.support.messages import matches, unprovoked
from tests.support.programs import ROOT

FOLDER = ROOT / "docs" / "errors"
ENTRIES = {
    (page.stem, title): text.strip()
    for page in sorted(FOLDER.glob("*.md"))
    for title, text in re.findall(r"^## ([^\n]*)\n(.*?)(?=^#|\Z)", page.read_text(), re.M | re.S)
}
"""The text below each heading, by page and heading."""


def quotes_of(title: str, text: str) -> list[str]:
    """The parts of messages that an entry is about: its heading, and what follows "Also:"."""
    also = re.match(r"Also: (.*?)\.\n\n", text, re.S)
    return re.findall(r"`([^`]+)`", f"{title} {also[1] if also else ''}")


QUOTES = [(quote, *place) for place, text in ENTRIES.items() for quote in quotes_of(place[1], text)]


@pytest.fixture(autouse=True)
def _libraries() -> None:
    for module in ("pytorch_grad_cam", "rich", "timm", "torchvision", "transformers"):
        pytest.importorskip(module)


# No parameters: each process that runs a test of this file provokes all cases.
def test_each_entry_raises_or_warns_once_and_a_page_explains_it() -> None:
    assert len(messages()) == len(CASES)
    assert not {title: found for title, found in messages().items() if len(found) != 1}
    every = [message for found in messages().values() for message in found]
    assert not [message for message in every if not any(matches(quote, message) for quote, *_ in QUOTES)]


def test_no_two_messages_are_equal_and_none_ends_a_sentence_with_four_dots() -> None:
    texts = [(title, text.partition(": ")[2]) for title, found in messages().items() for text in found]
    assert not [(a, b) for (a, first), (b, second) in combinations(texts, 2) if first == second]
    assert not [text for found in messages().values() for text in found if "...." in text]


def test_every_other_message_of_the_source_is_listed() -> None:
    """`python -m tests.support.messages` prints the list."""
    (listed,) = re.findall(r"^```none\n(.*?)```$", (FOLDER / "other.md").read_text(), re.M | re.S)
    assert listed.splitlines() == unprovoked()


def test_each_quote_is_in_a_current_message_and_in_one_entry() -> None:
    quotes, every = [quote for quote, *_ in QUOTES], [message for found in messages().values() for message in found]
    assert not [quote for quote in quotes if len(quote.replace("...", "")) < 8], "too short to search for"
    assert not [quote for quote in quotes if not any(matches(quote, message) for message in every)]
    assert len({quote: place for quote, *place in QUOTES}) == len({(quote, *place) for quote, *place in QUOTES})


def test_each_entry_says_what_to_do() -> None:
    said = {place: re.sub(r"Also: .*?\n\n", "", text, flags=re.S).split() for place, text in ENTRIES.items()}
    assert not [place for place, words in said.items() if len(words) < 5]


def test_the_entries_are_short() -> None:
    assert sum(len(page.read_text().split()) for page in FOLDER.glob("*.md") if page.stem != "other") <= 4_500


@pytest.mark.parametrize(("quote", "equal"), [("p = ..., got 2", True), ("= 0.1, got", True), ("p = 0.2", False)])
def test_an_ellipsis_stands_for_any_text(quote: str, equal: bool) -> None:
    assert matches(quote, "p = 0.1, got 2") is equal

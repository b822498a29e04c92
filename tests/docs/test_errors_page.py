"""Every entry of the error catalog raises or warns, and `docs/errors.md` explains its message, and quotes no other."""

import re
from itertools import combinations

import pytest

from tests.support.error_catalog import CASES, messages
from tests.support.messages import split, unquoted
from tests.support.programs import ROOT

PAGE = (ROOT / "docs" / "errors.md").read_text()
BLOCKS = re.findall(r"^```none\n(.*?)\n```$\n(.*?)(?=^#|\Z)", PAGE, re.M | re.S)
"""(quoted messages, the text up to the next heading)."""
QUOTES = [quote for block, _ in BLOCKS for quote in block.split("\n\n")]


@pytest.fixture(autouse=True)
def _libraries() -> None:
    for module in ("pytorch_grad_cam", "rich", "timm", "torchvision", "transformers"):
        pytest.importorskip(module)


@pytest.mark.parametrize("title", [title for title, _ in CASES])
def test_each_entry_raises_or_warns_once(title: str) -> None:
    assert len(messages()[title]) == 1, messages()[title]


def test_no_two_messages_are_equal_and_none_ends_a_sentence_with_four_dots() -> None:
    texts = [(title, text.partition(": ")[2]) for title, found in messages().items() for text in found]
    assert not [(a, b) for (a, first), (b, second) in combinations(texts, 2) if first == second]
    assert len(messages()) == len(CASES)
    assert not [text for found in messages().values() for text in found if "...." in text]


def matches(quote: str, message: str) -> bool:
    """Whether a quote is the message; `...` stands for any text."""
    return re.fullmatch(re.escape(quote).replace(r"\.\.\.", ".*"), message, re.S) is not None


def first_line(text: str) -> str:
    return text.partition("\n")[0]


@pytest.mark.parametrize("title", [title for title, _ in CASES])
def test_the_page_explains_each_message(title: str) -> None:
    for text in messages()[title]:
        line = first_line(text.removeprefix("CommandLineError: "))
        assert any(matches(first_line(quote), line) for quote in QUOTES), text


def test_every_other_message_of_the_source_is_listed() -> None:
    """`python -m tests.support.messages` prints the list."""
    rest, listed = split(PAGE)
    assert listed == unquoted(rest)


@pytest.mark.parametrize("quote", QUOTES, ids=first_line)
def test_each_quote_is_a_current_message(quote: str) -> None:
    provoked = [text.removeprefix("CommandLineError: ") for found in messages().values() for text in found]
    assert any(matches(quote, text) for text in provoked), quote


@pytest.mark.parametrize(("block", "text"), BLOCKS, ids=[first_line(block) for block, _ in BLOCKS])
def test_a_cause_and_a_fix_follow_each_message(block: str, text: str) -> None:
    assert re.fullmatch(r"\n\* \*\*Cause\*\*: .+\n\* \*\*Fix\*\*: .+\n*", text, re.S), block


@pytest.mark.parametrize(("quote", "equal"), [("p = ..., got 2", True), ("p = 0.1, got 2", True), ("p = 0.1", False)])
def test_an_ellipsis_stands_for_any_text(quote: str, equal: bool) -> None:
    assert matches(quote, "p = 0.1, got 2") is equal

"""Every entry of the error catalog raises or warns, each with its own message."""

from __future__ import annotations

from itertools import combinations

import pytest

from tests.support.error_catalog import CASES, code_of, messages


@pytest.fixture(autouse=True)
def _libraries() -> None:
    for module in ("pytorch_grad_cam", "rich", "timm", "torchvision", "transformers"):
        pytest.importorskip(module)


@pytest.mark.parametrize("title", [title for title, _ in CASES])
def test_each_entry_raises_or_warns_once(title: str) -> None:
    assert len(messages()[title]) == 1, messages()[title]


def test_no_two_messages_are_equal() -> None:
    texts = [(title, text.partition(": ")[2]) for title, found in messages().items() for text in found]
    assert not [(a, b) for (a, first), (b, second) in combinations(texts, 2) if first == second]
    assert len(messages()) == len(CASES)


def test_no_message_ends_a_sentence_with_four_dots() -> None:
    assert not [text for found in messages().values() for text in found if "...." in text]


def test_the_code_of_an_entry_is_its_body() -> None:
    assert code_of(CASES[0][1]) == 'inject(ResNet(), Dropout(p=0.1), layers="layer3")'

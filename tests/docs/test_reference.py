"""The reference lists every public name."""

from __future__ import annotations

import re
from types import ModuleType

import pytest

import hookdrop
from hookdrop import functional, observe, recipes, testing
from tests.support.programs import ROOT

TEXT = "\n".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
MODULES = {"observe", "recipes"}


def listed(module: ModuleType) -> list[str]:
    """The names that the reference lists under a module."""
    sections = re.split(r"^\.\. currentmodule:: (.*)$", TEXT, flags=re.M)
    texts = [text for name, text in zip(sections[1::2], sections[2::2], strict=True) if name == module.__name__]
    return [name for text in texts for name in re.findall(r"^   (\w+)$", text, re.M)]


@pytest.mark.parametrize(
    "module", [hookdrop, functional, recipes, observe, testing], ids=lambda module: module.__name__
)
def test_every_public_name_is_listed_once(module: ModuleType) -> None:
    assert sorted(listed(module)) == sorted(set(module.__all__) - MODULES)

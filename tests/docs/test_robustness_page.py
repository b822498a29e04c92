"""The tests named in docs/robustness.md exist."""

from __future__ import annotations

import re

import pytest

from tests.support.programs import ROOT

ROBUSTNESS = ROOT / "docs" / "robustness.md"


def named_tests() -> list[tuple[str, str]]:
    """Return (file, name) of each test in the document; an omitted file is that of the previous test."""
    found, file = [], ""
    for match in re.finditer(r"([\w/]+\.py)?::(\w+)", ROBUSTNESS.read_text()):
        file = match[1] or file
        found.append((file, match[2]))
    return found


@pytest.mark.parametrize(("file", "name"), named_tests())
def test_named_tests_exist(file: str, name: str) -> None:
    assert re.search(rf"^\s*(def|class) {name}\b", (ROOT / "tests" / file).read_text(), re.MULTILINE), f"{file}::{name}"


def test_every_table_row_names_a_test() -> None:
    rows = [line for line in ROBUSTNESS.read_text().splitlines() if line.startswith("| ") and "---" not in line]
    traps = [row for row in rows if not row.startswith("| trap |")]
    assert len(traps) > 50
    assert not [row for row in traps if "::" not in row]

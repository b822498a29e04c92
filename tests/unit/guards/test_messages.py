"""The table of guards in `docs/architecture.md` agrees with the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hookdrop.guards import progress
from hookdrop.guards.messages import MESSAGES
from hookdrop.guards.plan import Planned
from hookdrop.guards.problems import Comparison

ROOT = Path(__file__).parents[3]
TABLE = (ROOT / "docs/architecture.md").read_text().partition("\n## Guards\n")[2].partition("\n## ")[0]
ROWS = {kind: cells for kind, *cells in re.findall(r"^\| `(\w+)` \| (.+) \| (.+) \|$", TABLE, flags=re.M)}
DETECTED_BY = (Planned, Comparison, progress.Progress, progress)


def test_every_guard_has_a_row() -> None:
    assert list(ROWS) == list(MESSAGES)


@pytest.mark.parametrize("kind", MESSAGES)
def test_the_code_documents_the_detection_and_the_row_names_a_test(kind: str) -> None:
    _, test = ROWS[kind]
    (found,) = [place for place in DETECTED_BY if hasattr(place, kind) or kind in getattr(place, "__annotations__", {})]
    assert getattr(found, kind).__doc__
    path, _, names = test.strip("`").partition("::")
    text = (ROOT / "tests" / path).read_text()
    assert all(re.search(rf"(class|def) {name}\b", text) for name in names.split("::"))

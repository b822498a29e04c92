"""Run the code blocks of a Markdown page in order, and compare what they print with the documented output."""

import contextlib
import importlib.util
import io
import re
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

REQUIRES = r"(?:^<!-- the next block requires: (?P<requires>\w+) -->\n\n)?"
BLOCK = re.compile(REQUIRES + r"^```python\n(?P<code>.*?)^```$|^<!-- runs before the block\n(?P<hidden>.*?)^-->$|"
                   r"^```text\n(?P<text>.*?)^```$", re.M | re.S)  # fmt: skip
NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:e-?\d+)?(?![\w])")


class Block(NamedTuple):
    kind: str
    """`code`, `hidden` (code in a comment, which readers do not see), or `text` (the output of the code before it)."""
    text: str
    line: int
    requires: str | None = None
    """The library without which the block and its output are left out."""


def blocks_of(page: Path) -> list[Block]:
    text, requires, blocks = page.read_text(), None, []
    for match in BLOCK.finditer(text):
        kind = str(match.lastgroup)
        requires = requires if kind == "text" else match["requires"]
        blocks.append(Block(kind, match[kind], text[: match.start(kind)].count("\n") + 1, requires))
    return blocks


def matches(printed: str, documented: str, tolerance: float = 0.03) -> bool:
    """Compare words exactly, and numbers within a relative tolerance, as sums differ between machines."""
    words = [NUMBER.sub("#", re.sub(r" +|-{2,}", " ", text)).split() for text in (printed, documented)]
    numbers = [[float(n) for n in NUMBER.findall(text)] for text in (printed, documented)]
    return words[0] == words[1] and all(a == pytest.approx(b, rel=tolerance) for a, b in zip(*numbers, strict=True))


def run(page: Path, tolerance: float = 0.03) -> set[str]:
    """Run a page in the current folder and compare numbers within `tolerance`; an error names its line.

    Returns:
        The libraries that are not installed, whose blocks did not run.

    Raises:
        AssertionError: A block prints something other than documented.
    """
    module = ModuleType("page")
    names, printed = vars(module), ""
    missing: set[str] = set()
    # Classes of a page can only be pickled if their module can be imported.
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "page", module)
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", category=UserWarning, module="page")
        for kind, text, line, requires in blocks_of(page):
            if requires and importlib.util.find_spec(requires) is None:
                missing.add(requires)
                continue
            if kind == "text":
                where = f"{page.name}, line {line}"
                assert matches(printed, text, tolerance), f"{where} documents\n{text}\nbut the code prints\n{printed}"
                continue
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exec(compile("\n" * (line - 1) + text, str(page), "exec"), names)
            printed = output.getvalue()
    return missing

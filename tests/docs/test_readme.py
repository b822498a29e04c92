"""The code blocks of the README run in order and print the documented output."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from pathlib import Path

import pytest
import torch

from tests.support.programs import ROOT

README = ROOT / "README.md"
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```$|^<!-- runs before the block\n(?P<hidden>.*?)^-->$|"
                   r"^```text\n(?P<text>.*?)^```$", re.M | re.S)  # fmt: skip
NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:e-?\d+)?(?![\w])")


def blocks() -> list[tuple[str, str, int]]:
    """Return (kind, text, line) of each block in order."""
    text = README.read_text()
    found = []
    for match in BLOCK.finditer(text):
        kind = str(match.lastgroup)
        found.append((kind, match[kind], text[: match.start()].count("\n") + 2))
    return found


def matches(printed: str, documented: str) -> bool:
    """Compare words exactly and numbers within 3 %, as random draws and sums differ between machines."""
    words = [NUMBER.sub("#", re.sub(r" +|-{2,}", " ", text)).split() for text in (printed, documented)]
    numbers = [[float(n) for n in NUMBER.findall(text)] for text in (printed, documented)]
    return words[0] == words[1] and all(a == pytest.approx(b, rel=0.03) for a, b in zip(*numbers, strict=True))


def test_code_blocks_run_and_print_the_documented_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    names: dict[str, object] = {"__name__": "readme"}
    printed = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", category=UserWarning, module="readme")
        for kind, text, line in blocks():
            if kind == "text":
                assert matches(printed, text), f"README line {line} documents\n{text}\nbut the code prints\n{printed}"
                continue
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exec(compile("\n" * line + text, "README.md", "exec"), names)
            printed = output.getvalue()
    torch.set_num_threads(threads)
    torch.compiler.reset()


def test_readme_contains_code_and_output() -> None:
    kinds = [kind for kind, _, _ in blocks()]
    assert kinds.count("code") >= 12
    assert kinds.count("text") >= 11


def test_readme_starts_with_a_program_and_its_output() -> None:
    assert [kind for kind, _, _ in blocks()][:4] == ["code", "text", "code", "text"]
    assert blocks()[1][2] < 60


def test_links_resolve() -> None:
    text = README.read_text()
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (README.parent / target).exists(), target
    headings = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^## (.*)$", text, re.M)}
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= headings


@pytest.mark.parametrize(
    ("printed", "documented", "equal"),
    [("p 0.101\n", "p 0.100\n", True), ("p 0.2", "p 0.1", False), ("q 1", "p 1", False), ("p 1 2", "p 1", False)],
)
def test_output_comparison_detects_differences(printed: str, documented: str, equal: bool) -> None:
    assert matches(printed, documented) is equal

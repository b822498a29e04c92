"""The files, classes and functions that docs/architecture.md names exist."""

from __future__ import annotations

import re

import pytest

from tests.support.programs import ROOT

PAGE = re.sub(r"^```.*?^```$", "", (ROOT / "docs" / "architecture.md").read_text(), flags=re.M | re.S)
SOURCES = {
    f"/{path.relative_to(ROOT)}": path.read_text()
    for folder in ("hookdrop", "tests", "benchmarks")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".c")
}
QUOTED = sorted(set(re.findall(r"`([^`\n]+)`", PAGE)))


@pytest.mark.parametrize("text", [text for text in QUOTED if re.search(r"\.(py|c)\b", text) and "<" not in text])
def test_named_files_and_what_they_define_exist(text: str) -> None:
    path, *names = text.split("::")
    found = [source for name, source in SOURCES.items() if name.endswith(f"/{path}")]
    assert found
    for name in names:
        assert any(re.search(rf"^\s*(def|class) {name}\b", source, re.M) for source in found)


@pytest.mark.parametrize("text", [text for text in QUOTED if re.fullmatch(r"[\w.]+\w", text) and ".py" not in text])
def test_named_classes_and_functions_exist(text: str) -> None:
    last = text.rpartition(".")[2]
    assert any(re.search(rf"\b{last}\b", f"{name}\n{source}") for name, source in SOURCES.items()), text


@pytest.mark.parametrize(("package", "files"), re.findall(r"^\| `(\w+)/` \| [^|]*\| ([^|]*) \|$", PAGE, re.M))
def test_main_files_of_a_package_exist(package: str, files: str) -> None:
    for name in re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)", "", files)):
        assert f"/hookdrop/{package}/{name}.py" in SOURCES, name

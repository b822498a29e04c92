"""What a release contains: its metadata, the wheels with and without the compiled loops, and the source distribution."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

import hookdrop
from tests.support.programs import ROOT

ADDRESS = "https://example.org/someone/hookdrop"
LIBRARY = "hookdrop/accel/_blocks.native"


def run(folder: Path, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "HOOKDROP_KERNEL"} | settings
    return subprocess.run([sys.executable, "-m", *arguments], cwd=folder, env=env, capture_output=True, text=True)


def build(folder: Path, out: Path, target: str = "wheel", **settings: str) -> subprocess.CompletedProcess[str]:
    return run(folder, "hatchling", "build", "--target", target, "--directory", str(out), **settings)


def built(folder: Path, out: Path, target: str = "wheel", **settings: str) -> Path:
    done = build(folder, out, target, **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = out.iterdir()
    return found


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for module in ("hatchling", "hatch_fancy_pypi_readme"):
        pytest.importorskip(module, reason=f"{module} is not installed: pip install -e '.[dev]'")
    return built(ROOT, tmp_path_factory.mktemp("sdist"), "sdist")


@pytest.fixture
def sources(sdist: Path, tmp_path: Path) -> Path:
    """The unpacked source distribution."""
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "sources", filter="data")
    (folder,) = (tmp_path / "sources").iterdir()
    return folder


def files(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def package_files() -> set[str]:
    kinds = {".py", ".c", ".typed"}
    return {path.relative_to(ROOT).as_posix() for path in (ROOT / "hookdrop").rglob("*") if path.suffix in kinds}


def metadata(folder: Path) -> dict[str, Any]:
    done = run(folder, "hatchling", "metadata")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_source_distribution_contains_the_tests_and_what_they_read(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert package_files() <= names
    assert {"tests/docs/test_release.py", ".ci/install", ".github/workflows/core.yml", "Makefile", "LICENSE"} <= names
    assert {"CITATION.cff", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md", "docs/project/release.md"} <= names
    assert LIBRARY not in names
    assert sdist.name == f"hookdrop-{hookdrop.__version__}.tar.gz"


@pytest.mark.parametrize("settings", [{"HOOKDROP_KERNEL": "0"}, {"CC": "no-such-compiler"}], ids=str)
def test_wheel_for_every_platform_has_no_loops(settings: dict[str, str], sources: Path, tmp_path: Path) -> None:
    """Without a compiler, the build says what is slower."""
    done = build(sources, tmp_path / "out", **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (tmp_path / "out").iterdir()
    assert wheel.name == f"hookdrop-{hookdrop.__version__}-py3-none-any.whl"
    assert {name for name in files(wheel) if ".dist-info/" not in name} == package_files()
    slower = r"could not compile its C loops\. .* DropBlock.* times as long .* 'no-such-compiler'"
    assert bool(re.search(slower, flat(done))) is ("CC" in settings)


@pytest.mark.skipif(not (shutil.which("cc") or os.environ.get("CC")), reason="no C compiler")
def test_wheel_with_compiled_loops_is_for_one_platform_and_every_python(sources: Path, tmp_path: Path) -> None:
    wheel = built(sources, tmp_path / "out", HOOKDROP_KERNEL="require")
    assert re.fullmatch(rf"hookdrop-{hookdrop.__version__}-py3-none-(linux|macosx|win)_\w+\.whl", wheel.name)
    assert {name for name in files(wheel) if ".dist-info/" not in name} == package_files() | {LIBRARY}
    text = next(name for name in files(wheel) if name.endswith("/WHEEL"))
    assert "Root-Is-Purelib: false" in zipfile.ZipFile(wheel).read(text).decode()


def test_required_loops_that_cannot_be_built_fail_the_build(sources: Path, tmp_path: Path) -> None:
    for setting, message in {
        "require": r"could not compile its C loops, but HOOKDROP_KERNEL is 'require'\. .*'no-such-compiler'",
        "required": r"HOOKDROP_KERNEL is 'required'\. Unset it, or set it to 0 or require\.",
    }.items():
        done = build(sources, tmp_path / "out", HOOKDROP_KERNEL=setting, CC="no-such-compiler")
        assert done.returncode == 1
        assert re.search(message, flat(done))
        assert not list(tmp_path.glob("out/*.whl"))


def flat(done: subprocess.CompletedProcess[str]) -> str:
    return " ".join((done.stdout + done.stderr).split())


SHOWN = f"{ADDRESS}/blob/v{hookdrop.__version__}"
RAW = f"{ADDRESS}/raw/v{hookdrop.__version__}"
LINKS = {
    "[page](docs/a.md#part)": f"[page]({SHOWN}/docs/a.md#part)",
    "[two\nlines](CHANGELOG.md)": f"[two\nlines]({SHOWN}/CHANGELOG.md)",
    "[a](LICENSE) [b](CITATION.cff)": f"[a]({SHOWN}/LICENSE) [b]({SHOWN}/CITATION.cff)",
    "![a picture](docs/a.png)": f"![a picture]({RAW}/docs/a.png)",
    "[![a](docs/a.png)](docs/a.md)": f"[![a]({RAW}/docs/a.png)]({SHOWN}/docs/a.md)",
    '<img src="docs/a.png"> <a href="docs/a.md">': f'<img src="{RAW}/docs/a.png"> <a href="{SHOWN}/docs/a.md">',
    '`layers["a"](x)` [b](#b) [c](https://c.org/docs/)': '`layers["a"](x)` [b](#b) [c](https://c.org/docs/)',
}


def test_metadata_without_and_with_an_address(sources: Path) -> None:
    """An address makes links absolute."""
    found = metadata(sources)
    assert found["version"] == hookdrop.__version__
    assert found["authors"] == [{"name": "the hookdrop authors"}]
    assert found["readme"] == {"content-type": "text/markdown", "text": (ROOT / "README.md").read_text()}
    assert not found.get("urls")
    settings = (sources / "pyproject.toml").read_text()
    assert settings.count('\nrepository = ""\n') == 1
    (sources / "pyproject.toml").write_text(settings.replace('\nrepository = ""\n', f'\nrepository = "{ADDRESS}/"\n'))
    (sources / "README.md").write_text("\n\n".join([(sources / "README.md").read_text().rstrip(), *LINKS]))
    found = metadata(sources)
    assert found["urls"]["Repository"] == ADDRESS
    title, badges, *parts = found["readme"]["text"].split("\n\n")
    assert title == "# hookdrop"
    assert f"({ADDRESS}/actions/workflows/check.yml)" in badges
    assert parts[-len(LINKS) :] == list(LINKS.values())
    without_code = re.sub(r"^```.*?^```", "", "\n\n".join(parts[: -len(LINKS)]), flags=re.M | re.S)
    assert not re.findall(r"\]\((?!https?:|#)[^)]*\)|\b(?:src|srcset|href)=\"(?!https?:|#)", without_code)


def test_version_is_the_same_everywhere() -> None:
    assert re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.M)[1] == hookdrop.__version__  # type: ignore[index]
    heading = re.search(r"^## (\S+) \((?:unreleased|\d{4}-\d\d-\d\d)\)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert heading, "the top heading of CHANGELOG.md must be like '## 0.4.0 (unreleased)'"
    assert heading[1] == hookdrop.__version__


def test_workflows_test_the_oldest_versions_that_the_metadata_allows() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    pythons = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text)
    matrix = (ROOT / ".github" / "workflows" / "core.yml").read_text()
    assert f'requires-python = ">={pythons[0]}"' in text
    assert f'python: ["{pythons[0]}", "{pythons[-1]}"]' in matrix
    oldest = re.search(r'"torch>=([\d.]+)"', text)
    assert oldest
    assert f'torch: ["{oldest[1]}.0", ' in matrix


# Stands in for Python and, in .venv, for Python with pip. What it does is set by environment variables.
STUB = """#!/usr/bin/env bash
case "$*" in
    *version_info*) exit "${OLD:-0}" ;;
    "-m venv .venv") [ -n "${VENV_ERROR:-}" ] && { echo "$VENV_ERROR"; exit 1; }
        mkdir -p .venv/bin; cp "$0" .venv/bin/python; echo made >> log ;;
    "-m pip --version") exit 0 ;;
    "-m pip install"*) echo "${@: -1}" >> log; [ -n "${PIP_ERROR:-}" ] && { echo "$PIP_ERROR" >&2; exit 1; }; exit 0 ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "install", tmp_path / ".ci")
    (tmp_path / "python").write_text(STUB)
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def install(checkout: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHON": str(checkout / "python")} | settings
    return subprocess.run([".ci/install", "compare"], cwd=checkout, env=env, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"OLD": "1"}, r"hookdrop needs Python 3.11 or newer"),
        ({"PYTHON": "no-such-python"}, r"'no-such-python' is not: run 'make PYTHON="),
        ({"VENV_ERROR": "Error: No space left on device"}, r"The disk is full"),
        ({"VENV_ERROR": "ensurepip is not available"}, r"apt install python3-venv"),
        ({"PIP_ERROR": "OSError: [Errno 28] No space left on device"}, r"The disk is full"),
        ({"PIP_ERROR": "Temporary failure in name resolution"}, r"No package index can be reached: check the network"),
        ({"PIP_ERROR": "something else"}, r"pip could not install hookdrop\[compare\]: .*'make clean'"),
    ],
    ids=["old Python", "no Python", "full disk", "no venv module", "full disk in pip", "no network", "another error"],
)
def test_a_failure_says_what_to_do(checkout: Path, settings: dict[str, str], sentence: str) -> None:
    done = install(checkout, **settings)
    assert done.returncode == 1
    assert re.search(sentence, done.stderr.strip().splitlines()[-1]), done.stderr


def test_an_interrupted_installation_continues_and_an_incomplete_environment_is_created_again(checkout: Path) -> None:
    (checkout / ".venv" / "bin").mkdir(parents=True)
    (checkout / ".venv" / "bin" / "python").write_text("#!/bin/sh\nexit 1\n")
    (checkout / ".venv" / "bin" / "python").chmod(0o755)
    assert install(checkout, PIP_ERROR="killed").returncode == 1
    assert install(checkout).returncode == 0
    assert (checkout / "log").read_text().split() == ["made", ".[compare]", ".[compare]"]

"""With PyTorch alone, commands work, or name all packages that they lack with the command that installs them."""

import re
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

from tests.support.programs import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Links to PyTorch and what it requires, with their metadata: no other package exists there, nor hookdrop's."""
    folder, names = tmp_path_factory.mktemp("site"), ["torch"]
    for name in names:
        found = distribution(name)
        required = [re.split(r"[^\w.-]", text)[0] for text in found.requires or () if ";" not in text]
        names += [one for one in required if one not in names]
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            (folder / top).symlink_to(str(found.locate_file(top)))
    return folder


def run(site: Path | str, *arguments: str) -> tuple[int, str]:
    # -S leaves out the site packages of the environment; PyTorch warns that it has no NumPy.
    command = [sys.executable, "-S", "-W", "ignore", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={"PYTHONPATH": f"{site}:{ROOT}"})
    return done.returncode, done.stdout + done.stderr


COMPARE = r"\S+: timm, torchvision, .*pandas, .*pyyaml, .*scikit-learn.* not installed.\n.*pip install 'timm>=1.0' "


@pytest.mark.parametrize(
    ("command", "status", "says"),
    [
        ("benchmarks/compare.py --config quick.yaml", 1, rf"{COMPARE}.* \(hookdrop's extra: compare\)\n"),
        ("benchmarks/speed.py", 1, rf"{COMPARE}.*\n"),
        ("benchmarks/transformers_zoo.py", 1, rf"{COMPARE}.*'transformers>.*\(hookdrop's extras: compare, trans.*\n"),
    ],
)
def test_commands(site: Path, command: str, status: int, says: str) -> None:
    found, text = run(site, *command.split())
    assert (found, bool(re.fullmatch(says, text))) == (status, True), text


def test_help_of_compare_needs_no_package_and_every_program_reports_what_is_missing() -> None:
    status, text = run("", "benchmarks/compare.py", "--help")
    assert (status, "--dry-run" in text) == (0, True), text
    for path in (ROOT / "benchmarks").glob("*.py"):
        assert ("__main__" in (text := path.read_text())) == ("\nimport packages" in text), path.name


def test_a_missing_trainer_names_its_extra(site: Path) -> None:
    code = """
import hookdrop
assert hookdrop.functional.dropout and hookdrop.testing.check_recipe and hookdrop.observe.Record
for name in {"fastai", "lightning", "transformers"} & {*dir(hookdrop.integrations)}:
    try:
        getattr(hookdrop.integrations, name)
    except ImportError as error:
        assert isinstance(error, hookdrop.HookdropError) and str(error).endswith(f"(hookdrop's extra: {name})"), error
        print(str(error).partition(" not ")[0])
"""
    status, text = run(site, "-c", code)
    assert (status, sorted(text.splitlines())) == (0, ["fastai is", "lightning is", "transformers, accelerate are"])


def test_the_first_blocks_of_the_readme_run_with_pytorch_alone(site: Path, tmp_path: Path) -> None:
    """Up to the line that installs timm."""
    told = (ROOT / "README.md").read_text().partition("pip install timm")[0]
    (tmp_path / "page.py").write_text("\n".join(re.findall(r"^```python\n(.*?)^```$", told, re.M | re.S)))
    status, printed = run(site, str(tmp_path / "page.py"))
    assert (status, printed) == (0, "".join(re.findall(r"^```text\n(.*?)^```$", told, re.M | re.S)))

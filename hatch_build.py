"""What hatchling runs during a build: it compiles the C loops of a wheel and writes the long description.

`hookdrop/accel/_blocks.c` is compiled if a C compiler is available. Without one the package works but is slower.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatch_fancy_pypi_readme import hooks as fancy_readme
from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

FLAGS = ["-O3", "-fno-strict-aliasing", "-fPIC", "-shared"]
# With OpenMP the library uses PyTorch's threads, otherwise one. On macOS and Windows, OpenMP would be a second runtime.
ATTEMPTS = {"linux": [["-fopenmp"], []], "win32": [["-static"]]}.get(sys.platform, [[]])


class Kernel(BuildHookInterface):
    """Builds the shared library next to its source, and tags the wheel with the platform if the build succeeded.

    The environment variable HOOKDROP_KERNEL changes that: 0 builds a wheel for all platforms, without the library;
    `require` makes the build fail if the library cannot be built.
    """

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Hatchling calls this before it builds a wheel, including editable ones."""
        setting = os.environ.get("HOOKDROP_KERNEL", "")
        if setting not in ("", "0", "require"):
            self.app.abort(f"hookdrop: HOOKDROP_KERNEL is {setting!r}. Unset it, or set it to 0 or require.")
        if setting == "0":
            return
        error = self._build()
        if not error:
            build_data["artifacts"].append("hookdrop/accel/_blocks.native")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{_platform()}"
        elif setting == "require":
            self.app.abort(f"hookdrop: could not compile its C loops, but HOOKDROP_KERNEL is 'require'.\n{error}")
        else:
            self.app.display_warning(
                "hookdrop: could not compile its C loops. Everything works without them, but on a CPU DropBlock, and "
                "Dropout of large tensors, took 1.5 to 3 times as long in benchmarks/results. To compile the loops, "
                f"install a C compiler and then hookdrop again.\n{error}"
            )

    def _build(self) -> str:
        """Return the error message, or an empty string on success."""
        source = Path(self.root, "hookdrop", "accel", "_blocks.c")
        output = source.with_suffix(".new")
        error = ""
        for flags in ATTEMPTS:
            error = _compile([*FLAGS, *flags, str(source), "-o", str(output)])
            if not error:
                # Replace an existing library only after a successful build.
                output.replace(source.with_suffix(".native"))
                break
        return error


def _compile(arguments: list[str]) -> str:
    """Run the compiler. Returns the error message, or an empty string on success."""
    compiler = shlex.split(os.environ.get("CC") or ("gcc" if sys.platform == "win32" else "cc"))
    try:
        result = subprocess.run([*compiler, *arguments], capture_output=True, text=True)
    except OSError as error:
        return str(error)
    return "" if result.returncode == 0 else f"{compiler[0]}: {result.stderr.strip() or result.returncode}"


def _platform() -> str:
    if sys.platform == "darwin":
        version = os.environ.get("MACOSX_DEPLOYMENT_TARGET", "11.0").split(".")
        return f"macosx_{version[0]}_{version[1] if len(version) > 1 else 0}_{os.uname().machine}"
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


BADGES = """
[![PyPI](https://img.shields.io/pypi/v/hookdrop)](https://pypi.org/project/hookdrop/)
[![Python](https://img.shields.io/pypi/pyversions/hookdrop)](https://pypi.org/project/hookdrop/)
[![Tests]({0}/actions/workflows/check.yml/badge.svg)]({0}/actions/workflows/check.yml)
"""
# A link to a file of the repository. Code such as `table["a"](x)` must not match.
FILE = r"((?:\.github|benchmarks|docs|examples|hookdrop|tests)/[^)\"\s]*|[A-Z_]+\.(?:md|cff)|LICENSE)"


class Readme(MetadataHookInterface):
    """Makes the README the long description. If `repository` is set, adds URLs and badges, and makes links absolute."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Hatchling calls this for every build, after it has read the version."""
        repository = self.config["repository"].rstrip("/")
        metadata["urls"] = {}
        substitutions = []
        if repository:
            metadata["urls"] = {
                "Repository": repository,
                "Changelog": f"{repository}/blob/main/CHANGELOG.md",
                "Issues": f"{repository}/issues",
            }
            shown, raw = (f"{repository}/{kind}/v{metadata['version']}" for kind in ("blob", "raw"))
            substitutions = [
                {"pattern": r"\A(# .*\n)", "replacement": r"\1" + BADGES.format(repository)},
                {"pattern": r"(!\[[^\]]*\]\()" + FILE, "replacement": rf"\g<1>{raw}/\2"},
                {"pattern": r"(\b(?:src|srcset)=\")" + FILE, "replacement": rf"\g<1>{raw}/\2"},
                {"pattern": r"(\]\(|\bhref=\")" + FILE, "replacement": rf"\g<1>{shown}/\2"},
            ]
        config = {
            "content-type": "text/markdown",
            "fragments": [{"path": str(Path(self.root, "README.md"))}],
            "substitutions": substitutions,
        }
        fancy_readme.FancyReadmeMetadataHook(self.root, config).update(metadata)

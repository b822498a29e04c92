"""Compiles `hookdrop/kernels/_blocks.c` if a C compiler is available. Without one the package works but is slower."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FLAGS = ["-O3", "-fno-strict-aliasing", "-fPIC", "-shared"]


class Kernel(BuildHookInterface):
    """Builds the shared library next to its source, and tags the wheel with the platform if the build succeeded."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Hatchling calls this before it builds a wheel, including editable ones."""
        source = Path(self.root, "hookdrop", "kernels", "_blocks.c")
        library = source.with_suffix(".native")
        if os.environ.get("HOOKDROP_KERNEL") == "0":
            return
        error = ""
        # With OpenMP the library uses PyTorch's threads, otherwise a single thread.
        for openmp in (["-fopenmp"], []):
            output = library.with_suffix(".new")
            error = _compile([*FLAGS, *openmp, str(source), "-o", str(output)])
            if not error:
                # Replace an existing library only after a successful build.
                output.replace(library)
                build_data["artifacts"].append("hookdrop/kernels/_blocks.native")
                build_data["pure_python"] = False
                build_data["tag"] = f"py3-none-{_platform()}"
                return
        self.app.display_warning(
            "hookdrop: could not compile its C loops. Everything works without them, but DropBlock and Dropout are up "
            f"to three times slower on a CPU.\n{error}"
        )


def _compile(arguments: list[str]) -> str:
    """Run the compiler. Returns the error message, or an empty string on success."""
    compiler = shlex.split(os.environ.get("CC") or "cc")
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

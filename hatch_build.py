"""Compiles `hookdrop/kernels/_blocks.c` where there is a C compiler; without one the package works, only slower."""

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
    """Puts the shared library beside its source, and the platform into the wheel's name if it was built."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before a wheel, an editable one too, is put together."""
        source = Path(self.root, "hookdrop", "kernels", "_blocks.c")
        library = source.with_suffix(".native")
        if os.environ.get("HOOKDROP_KERNEL") == "0":
            return
        said = ""
        # With OpenMP it runs on PyTorch's own threads; without, on one.
        for openmp in (["-fopenmp"], []):
            made = library.with_suffix(".new")
            said = _compile([*FLAGS, *openmp, str(source), "-o", str(made)])
            if not said:
                # Only now: what was there before stays if nothing better can be made.
                made.replace(library)
                build_data["artifacts"].append("hookdrop/kernels/_blocks.native")
                build_data["pure_python"] = False
                build_data["tag"] = f"py3-none-{_platform()}"
                return
        self.app.display_warning(
            "hookdrop: its C loops could not be compiled. All works without them; on a CPU DropBlock and Dropout take "
            f"up to three times as long.\n{said}"
        )


def _compile(arguments: list[str]) -> str:
    """Empty, or why it could not be done."""
    compiler = shlex.split(os.environ.get("CC") or "cc")
    try:
        done = subprocess.run([*compiler, *arguments], capture_output=True, text=True)
    except OSError as error:
        return str(error)
    return "" if done.returncode == 0 else f"{compiler[0]}: {done.stderr.strip() or done.returncode}"


def _platform() -> str:
    if sys.platform == "darwin":
        version = os.environ.get("MACOSX_DEPLOYMENT_TARGET", "11.0").split(".")
        return f"macosx_{version[0]}_{version[1] if len(version) > 1 else 0}_{os.uname().machine}"
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")

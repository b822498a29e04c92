"""The packages of an extra, and which of them are not installed. Importing it imports no PyTorch."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import distributions, requires
from pathlib import Path

_PROJECT = Path(__file__).parents[1] / "pyproject.toml"


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Raise an error if an import inside this block fails, and name all packages of the extra that are missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        from hookdrop.core.errors import MissingPackageError

        module = (error.name or "a package").partition(".")[0]
        raise MissingPackageError(missing_packages(module, extra), name=error.name) from None


def missing_packages(module: str, *extras: str) -> str:
    """Return the message for a module that cannot be imported. It names all packages of the extras that are missing."""
    declared = _declared()
    needed = [one for extra in extras for one in _flat(extra, declared)]
    absent = [one for one in dict.fromkeys([*declared[""], *needed]) if not any(distributions(name=_name(one)))]
    names = [*map(_name, absent)] or [module]
    command = shlex.join(["pip", "install", *(absent or needed)])
    return (
        f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} not installed.\n"
        f"  install what this needs: {command}   (hookdrop's extra{'s' * (len(extras) > 1)}: {', '.join(extras)})"
    )


def _declared() -> dict[str, list[str]]:
    """Return the requirements of hookdrop (`""`) and of its extras. A checkout may be newer than what is installed."""
    project = tomllib.loads(_PROJECT.read_text(encoding="utf-8")).get("project", {}) if _PROJECT.exists() else {}
    if project.get("name") == "hookdrop":
        return {"": project["dependencies"], **project["optional-dependencies"]}
    found: dict[str, list[str]] = {"": []}
    for text in requires("hookdrop") or ():
        requirement, _, marker = text.partition(";")
        extra = re.search(r"extra == ['\"]([\w-]+)", marker)
        found.setdefault(extra[1] if extra else "", []).append(requirement.strip())
    return found


def _flat(extra: str, declared: dict[str, list[str]]) -> list[str]:
    """Return the requirements of an extra, with those of the extras that it contains."""
    found: list[str] = []
    for one in declared.get(extra, ()):
        inner = re.fullmatch(r"hookdrop\[(.+)\]", one)
        found += [each for name in inner[1].split(",") for each in _flat(name, declared)] if inner else [one]
    return found


def _name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]

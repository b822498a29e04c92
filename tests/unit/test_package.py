"""What `import hookdrop` gives: every module under its own name, and everything public under `*`."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import hookdrop


@pytest.mark.parametrize("name", ["plan", "inject"])
def test_a_function_is_not_imported_as_a_module(name: str) -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"hookdrop.{name}")
    assert callable(getattr(hookdrop, name))


MODULES = [module.name for module in pkgutil.walk_packages(hookdrop.__path__, "hookdrop.")]


@pytest.mark.parametrize("name", [name for name in MODULES if not name.endswith("__main__")])
def test_no_module_hides_behind_another_name(name: str) -> None:
    """`import hookdrop.observe.capture as c` gave a function, because the package exported one of that name."""
    module = importlib.import_module(name)
    parent, _, last = name.rpartition(".")
    assert getattr(importlib.import_module(parent), last) is module


def test_the_verbs_are_functions_and_no_module_has_their_names() -> None:
    assert callable(hookdrop.inject)
    assert callable(hookdrop.plan)
    assert not {"hookdrop.inject", "hookdrop.plan"} & set(MODULES)


def test_a_star_import_gives_every_public_package() -> None:
    names: dict[str, object] = {}
    exec("from hookdrop import *", names)
    assert (names["recipes"], names["observe"]) == (hookdrop.recipes, hookdrop.observe)

"""`import hookdrop`: every module has its own name, and `*` imports everything public."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import hookdrop
from tests.support.programs import run_code


@pytest.mark.parametrize("name", ["plan", "inject"])
def test_public_functions_are_not_modules(name: str) -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"hookdrop.{name}")
    assert callable(getattr(hookdrop, name))


MODULES = [module.name for module in pkgutil.walk_packages(hookdrop.__path__, "hookdrop.")]


@pytest.mark.parametrize("name", [name for name in MODULES if not name.endswith("__main__")])
def test_no_module_is_shadowed_by_another_name(name: str) -> None:
    """`import hookdrop.observe.capture as c` imported a function that the package exported under that name."""
    module = importlib.import_module(name)
    parent, _, last = name.rpartition(".")
    assert getattr(importlib.import_module(parent), last) is module


def test_star_import_includes_the_public_packages() -> None:
    names: dict[str, object] = {}
    exec("from hookdrop import *", names)
    assert (names["recipes"], names["observe"]) == (hookdrop.recipes, hookdrop.observe)


def test_packages_that_are_imported_on_first_use_are_listed_before() -> None:
    """For the completion of names in a notebook."""
    loaded = "{'hookdrop.observe', 'hookdrop.recipes.branches'} & set(sys.modules)"
    listed = "{'observe', 'recipes'} <= set(dir(hookdrop)) and 'neftune' in dir(hookdrop.recipes)"
    assert run_code(f"import sys, hookdrop; print({loaded}, {listed})").split() == ["set()", "True"]


def test_a_name_that_does_not_exist() -> None:
    with pytest.raises(AttributeError, match="'hookdrop' has no attribute 'nonsense'"):
        _ = hookdrop.nonsense

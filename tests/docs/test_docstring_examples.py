"""Doctests of all modules."""

from __future__ import annotations

import copy
import doctest
import importlib
import pkgutil

import pytest
import torch
from torch import nn

import hookdrop

MODULES = [info.name for info in pkgutil.walk_packages(hookdrop.__path__, "hookdrop.") if "__main__" not in info.name]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_run(name: str) -> None:
    module = importlib.import_module(name)
    names = {key: getattr(hookdrop, key) for key in hookdrop.__all__}
    result = doctest.testmod(module, extraglobs={"torch": torch, "nn": nn, "copy": copy, **names})
    assert result.failed == 0


def test_docstrings_contain_examples() -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    core = [name for name in MODULES if not name.startswith("hookdrop.integrations.")]  # the others import trainers
    found = sum(len(finder.find(importlib.import_module(name))) for name in core)
    assert found > 20

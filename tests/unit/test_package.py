"""`import hookdrop`: every module has its own name, and `*` imports everything public; the table of regularizers and `parse`."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import hookdrop
from hookdrop import Dropout, parse
from hookdrop.regularizers import REGULARIZERS
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


class TestParse:
    def test_reads_literal_settings(self) -> None:
        made = parse(" DropBlock(0.2, block_size=(3, 5), per_channel=False, normalize=None) ")
        assert repr(made) == "DropBlock(p=0.2, block_size=(3, 5), per_channel=False, normalize=None)"

    @pytest.mark.parametrize(
        "text",
        [
            "__import__('os').system('true')",
            "DropBlock(p=__import__('os').getpid())",
            "DropBlock(p=1-0.9 if True else 0)",
            "DropBlock(**{'p': 0.1})",
            "DropBlock(p=0.1); print(1)",
            "(lambda: DropBlock(0.1))()",
            "hookdrop.DropBlock(p=0.1)",
            "DropBlock(p=[x for x in (1,)])",
            "DropBlock(p=0.1",
            "",
            "0.1",
            "\x00",
            "Dropout(p=" + "-" * 5000 + "1)",
            "DropBlock(p=0.1, p=0.2)",
        ],
    )
    def test_never_runs_code(self, text: str) -> None:
        with pytest.raises(ValueError, match="parse: "):
            parse(text)

    @pytest.mark.parametrize(
        ("text", "error", "says"),
        [
            ("DropPath", ValueError, r"write 'DropPath\(...\)'(.|\n)*signature: DropPath\(p"),
            (Dropout(0.1), TypeError, "must be a str"),
        ],
    )
    def test_other_texts_raise_with_the_nearest_valid_one(self, text: str, error: type[Exception], says: str) -> None:
        with pytest.raises(error, match=says):
            parse(text)


def test_every_regularizer_cites_its_paper() -> None:
    for name, cls in REGULARIZERS.items():
        text = "".join(base.__doc__ or "" for base in cls.__mro__ if base.__module__.startswith("hookdrop.regul"))
        assert "arXiv" in text or "Srivastava" in text or "Bishop" in text, name


def test_public_names_exist_and_are_sorted() -> None:
    assert all(hasattr(hookdrop, name) for name in hookdrop.__all__)
    assert sorted(hookdrop.__all__) == hookdrop.__all__
    assert set(REGULARIZERS) <= set(hookdrop.__all__)

"""`import hookdrop`: public names, the table of regularizers, `parse`; arguments that a class does not have, and signatures."""

import importlib
import inspect
import pkgutil
from abc import ABC
from dataclasses import dataclass, replace
from typing import Any

import pytest
from torch import nn

import hookdrop
from hookdrop import DropBlock, Dropout, InjectionSpec, LinearSchedule, Regularizer, TokenDropout, parse, recipes
from hookdrop.core.parts import REGULARIZERS
from hookdrop.core.schedules import SCHEDULES, Schedule
from tests.support.programs import run_code

MODULES = [module.name for module in pkgutil.walk_packages(hookdrop.__path__, "hookdrop.")]


@pytest.mark.parametrize("name", MODULES)
def test_no_module_is_shadowed_by_another_name(name: str) -> None:
    """`import hookdrop.observe.capture as c` imported a function that the package exported under that name."""
    module = importlib.import_module(name)
    parent, _, last = name.rpartition(".")
    assert getattr(importlib.import_module(parent), last) is module


def test_packages_that_are_imported_on_first_use_are_listed_before() -> None:
    """For the completion of names in a notebook."""
    packages = {"functional", "integrations", "observe", "recipes", "testing"}
    listed = f"{packages} <= {{*dir(hookdrop)}} and 'neftune' in dir(hookdrop.recipes)"
    is_listed, *loaded = run_code(f"import sys, hookdrop; print({listed}, *sys.modules)").split()
    late = {f"hookdrop.{name}" for name in packages - {"recipes"} | {"methods.branches"}}
    assert (is_listed, late & {*loaded}) == ("True", set())


def test_import_hookdrop_defines_the_operators_that_exported_programs_name() -> None:
    """A program that another process has exported loads after this import alone."""
    names = [name for name in MODULES if ".kernels" in name or ".regularizers" in name]
    every = f"for name in {names}: importlib.import_module(name)\n"
    count = "import torch; print(sum(n.startswith('hookdrop::') for n in torch._C._dispatch_get_all_op_names()))"
    alone, all_of_them = (int(run_code(f"import importlib, hookdrop\n{more}{count}")) for more in ("", every))
    assert alone == all_of_them > 1


def test_a_name_that_does_not_exist() -> None:
    for package in (hookdrop, hookdrop.integrations):
        with pytest.raises(AttributeError, match=f"'{package.__name__}' has no attribute 'nonsense'"):
            _ = package.nonsense


class TestParse:
    def test_reads_literal_settings(self) -> None:
        made = parse(" DropBlock(0.2, block_size=(3, 5), per_channel=False, normalize=None) ")
        assert repr(made) == "DropBlock(p=0.2, block_size=(3, 5), per_channel=False, normalize=None)"

    CODE = """__import__('os').system('true') | DropBlock(p=__import__('os').getpid()) | DropBlock(p=1-0.9 if True else 0)
        | DropBlock(**{'p': 0.1}) | DropBlock(p=0.1); print(1) | (lambda: DropBlock(0.1))() | hookdrop.DropBlock(p=0.1)
        | DropBlock(p=[x for x in (1,)]) | DropBlock(p=0.1 | 0.1 | DropBlock(p=0.1, p=0.2) | \x00 |"""

    @pytest.mark.parametrize("text", [*map(str.strip, CODE.split("|")), "Dropout(p=" + "-" * 5000 + "1)"])
    def test_never_runs_code(self, text: str) -> None:
        with pytest.raises(ValueError, match="parse: "):
            parse(text)

    def test_other_texts_raise_with_the_nearest_valid_one(self) -> None:
        with pytest.raises(ValueError, match=r"write 'DropPath\(...\)'(.|\n)*signature: DropPath\(p"):
            parse("DropPath")
        with pytest.raises(TypeError, match="must be a str"):
            parse(Dropout(0.1))


def test_every_regularizer_cites_its_paper() -> None:
    for name, cls in REGULARIZERS.items():
        text = "".join(base.__doc__ or "" for base in cls.__mro__ if base.__module__.startswith("hookdrop.regul"))
        assert "arXiv" in text or "Srivastava" in text or "Bishop" in text, name


def test_public_names_are_exported_and_sorted() -> None:
    names: dict[str, object] = {}
    exec("from hookdrop import *", names)
    assert all(names[name] is getattr(hookdrop, name) for name in hookdrop.__all__)
    assert {"integrations", "observe", "plan", "recipes"} <= {*names}
    assert sorted(hookdrop.__all__) == hookdrop.__all__
    assert set(REGULARIZERS) <= set(hookdrop.__all__)


MODEL = nn.Sequential(nn.Linear(2, 2))


def trainer_callback(**settings: Any) -> Any:
    pytest.importorskip("transformers")
    return hookdrop.integrations.transformers.InjectionCallback(InjectionSpec("Dropout(p=0.1)", layers="0"), **settings)


@pytest.mark.parametrize(
    ("call", "nearest"),
    [
        (lambda: Dropout(drop_prob=0.1), "'p'"),
        (lambda: Dropout(keep_probability=0.9), "'keep_prob'"),
        (lambda: DropBlock(0.1, size=7), "'block_size'"),
        (lambda: hookdrop.GaussianNoise(sigma=0.1), ""),
        (lambda: LinearSchedule(epochs=5), "'steps'"),
        (lambda: recipes.stochastic_depth(drop_path_rate=0.1), "'p'"),
        (lambda: InjectionSpec.from_dict({"layer": "0"}), "'layers'"),
        (lambda: parse("Dropout(drop_prob=0.1)"), "'p'"),
        (lambda: hookdrop.inject(MODEL, Dropout(0.1), layer="0"), "'layers'"),
        (lambda: hookdrop.plan(MODEL, Dropout(0.1), layers="0", example=1), "'example_input'"),
        (lambda: hookdrop.layers(MODEL, example=1), "'example_input'"),
        (lambda: InjectionSpec("Dropout(p=0.1)", layer="0"), "'layers'"),
        (lambda: hookdrop.find(MODEL).predict(1, n_samples=3), "'samples'"),
        (lambda: hookdrop.find(MODEL).sampling(rate=0.1), "'p'"),
        (lambda: trainer_callback(logs=True), "'log'"),
    ],
)
def test_an_unknown_argument_names_the_nearest(call: Any, nearest: str) -> None:
    with pytest.raises(TypeError, match=f"did you mean: {nearest}" if nearest else "signature: GaussianNoise"):
        call()
    for other in (LinearSchedule, lambda: Dropout(0.1, 0.2)):  # an error of Python
        with pytest.raises(TypeError, match="positional argument"):
            other()


def test_an_argument_of_the_regularizer_that_is_passed_to_inject() -> None:
    for source in (Dropout, Dropout(0.1)):
        with pytest.raises(TypeError, match=r"no argument 'p', but Dropout has: write Dropout\(p=...\)\nNo hook was"):
            hookdrop.inject(MODEL, source, p=0.1, layers="0")


def test_decorated_functions_keep_their_signatures() -> None:
    assert [*inspect.signature(hookdrop.inject).parameters][:3] == ["model", "regularizer", "layers"]
    assert inspect.signature(hookdrop.inject).parameters["layers"].default is None
    assert [*inspect.signature(hookdrop.Injection.step).parameters] == ["self", "n"]


@pytest.mark.parametrize("cls", [*REGULARIZERS.values(), *SCHEDULES.values(), InjectionSpec], ids=lambda c: c.__name__)
def test_signatures_are_those_of_the_classes(cls: type) -> None:
    expected = list(inspect.signature(cls.__init__).parameters.values())[1:]  # type: ignore[misc]
    assert list(inspect.signature(cls).parameters.values()) == expected


@dataclass(frozen=True, repr=False)
class Decorated(Schedule):
    height: float = 0.5

    def __call__(self, step: int) -> float:
        return self.height


class Fields(Schedule):
    height: float = 0.5

    def __call__(self, step: int) -> float:
        return self.height


class MoreFields(LinearSchedule):
    height: float = 0.5


class Plain(Schedule):
    """Neither a dataclass nor one that takes its fields: it stores its argument."""

    _step_fields = {"steps": 1}

    def __init__(self, steps: float) -> None:
        self.steps = steps

    def __call__(self, step: int) -> float:
        return float(step >= self.steps)


class TestOwnClasses:
    def test_a_schedule_that_is_no_dataclass_says_how_to_write_it(self) -> None:
        assert replace(Decorated(0.25), height=0.75).simulate(1) == [0.75]
        for call in (lambda: Fields(height=0.25), lambda: Fields(0.25), lambda: MoreFields(4, height=0.25)):
            with pytest.raises(TypeError, match=r"is no dataclass(?s:.)*write: @dataclass\(frozen=True, repr=False\)"):
                call()

    def test_a_schedule_with_an_init(self) -> None:
        assert Plain(0.5).resolve(4).simulate(4) == [0.0, 0.0, 1.0, 1.0]
        assert repr(Plain(3)) == "Plain(steps=3)"
        assert (repr(Fields()), str(inspect.signature(Fields))) == ("Fields()", "()")

    def test_a_class_that_takes_any_argument_or_has_another_metaclass(self) -> None:
        class Any_(Regularizer):
            rate = None

            def __init__(self, **settings: float) -> None:
                super().__init__()

        Any_(whatever=1.0)

        class Mine(TokenDropout, ABC):
            pass

        assert Mine(0.1).p == 0.1

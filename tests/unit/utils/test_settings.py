"""Arguments that a class does not have, and its signature."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any

import pytest

from hookdrop import (
    DropBlock,
    Dropout,
    GaussianNoise,
    InjectionSpec,
    LinearSchedule,
    Regularizer,
    TokenDropout,
    parse,
    recipes,
)
from hookdrop.regularizers import REGULARIZERS
from hookdrop.schedules import SCHEDULES, Schedule


@pytest.mark.parametrize(
    ("call", "nearest"),
    [
        (lambda: Dropout(drop_prob=0.1), "'p'"),
        (lambda: Dropout(keep_probability=0.9), "'keep_prob'"),
        (lambda: DropBlock(0.1, size=7), "'block_size'"),
        (lambda: GaussianNoise(sigma=0.1), ""),
        (lambda: LinearSchedule(epochs=5), "'steps'"),
        (lambda: recipes.stochastic_depth(drop_path_rate=0.1), "'p'"),
        (lambda: InjectionSpec.from_dict({"layer": "0"}), "'layers'"),
        (lambda: parse("Dropout(drop_prob=0.1)"), "'p'"),
    ],
)
def test_an_unknown_argument_names_the_nearest(call: Any, nearest: str) -> None:
    with pytest.raises(TypeError, match=f"did you mean: {nearest}" if nearest else "signature: GaussianNoise"):
        call()


def test_other_type_errors_are_those_of_python() -> None:
    for call in (LinearSchedule, lambda: Dropout(0.1, 0.2)):
        with pytest.raises(TypeError, match="positional argument"):
            call()


@pytest.mark.parametrize(
    "cls", [*REGULARIZERS.values(), *SCHEDULES.values(), InjectionSpec], ids=lambda cls: cls.__name__
)
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

    def test_a_class_that_takes_any_argument(self) -> None:
        class Any_(Regularizer):
            rate = None

            def __init__(self, **settings: float) -> None:
                super().__init__()

        Any_(whatever=1.0)

    def test_classes_of_other_bases(self) -> None:
        """`abc.ABC` has another metaclass."""
        from abc import ABC

        class Mine(TokenDropout, ABC):
            pass

        assert Mine(0.1).p == 0.1

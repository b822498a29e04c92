"""`check_recipe`: a right recipe passes, and wrong ones fail the check of what is wrong.

tests/integration/models/test_recipe_conformance.py checks hookdrop's recipes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from hookdrop import DropPath, Regularizer, ScaleActivationGrad
from hookdrop.recipes.base import Recipe, RecipeSite
from hookdrop.testing import check_recipe, recipe_checks
from tests.support.models import Small
from tests.unit.testing.test_regularizers import MixesSamples

IMAGES = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class branches(Recipe):
    """A right one, which the others change in one place."""

    p: float = 0.5

    def regularizer(self) -> Regularizer:
        return DropPath(self.p)

    def sites(self, model: nn.Module, survey: Any) -> Sequence[RecipeSite]:
        return [RecipeSite(branch.end, self.regularizer(), group=branch.layer) for branch in survey.branches]


@dataclass(frozen=True, eq=False)
class never_equal(branches):
    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__


@dataclass(frozen=True)
class another_rate_each_time(branches):
    calls: ClassVar[list[int]] = []

    def regularizer(self) -> Regularizer:
        self.calls.append(1)
        return DropPath(self.p / len(self.calls))


@dataclass(frozen=True)
class by_chance(branches):
    def sites(self, model: nn.Module, survey: Any) -> Sequence[RecipeSite]:
        return super().sites(model, survey)[int(torch.rand(()) < 0.5) :]


@dataclass(frozen=True)
class never_called(branches):
    def sites(self, model: nn.Module, survey: Any) -> Sequence[RecipeSite]:
        return [*super().sites(model, survey), RecipeSite("unused", DropPath(self.p))]


@dataclass(frozen=True)
class writes_to_weights(branches):
    def sites(self, model: nn.Module, survey: Any) -> Sequence[RecipeSite]:
        model.fc.bias.data.add_(1.0)
        return super().sites(model, survey)


@dataclass(frozen=True)
class changes_the_momentum(branches):
    def sites(self, model: nn.Module, survey: Any) -> Sequence[RecipeSite]:
        model.layer1[0].bn1.momentum *= 0.5
        return super().sites(model, survey)


@dataclass(frozen=True)
class active_at_rate_0(branches):
    def regularizer(self) -> Regularizer:
        return ScaleActivationGrad(0.5)


@dataclass(frozen=True)
class no_effect(branches):
    def regularizer(self) -> Regularizer:
        return DropPath(0.0)


@dataclass(frozen=True)
class mixes_samples(branches):
    def regularizer(self) -> Regularizer:
        return MixesSamples(self.p)


@dataclass(frozen=True)
class group_inside_the_branch(branches):
    def sites(self, model: nn.Module, survey: Any) -> Sequence[RecipeSite]:
        return [RecipeSite(one.end, self.regularizer(), group=f"{one.layer}.conv2") for one in survey.branches]


BROKEN: dict[type[branches], str] = {
    never_equal: "has_a_text_form",
    another_rate_each_time: "has_a_spec",
    by_chance: "planning_changes_nothing",
    never_called: "sites_are_called",
    writes_to_weights: "eval_is_bit_equal",
    active_at_rate_0: "rate_0_is_bit_equal",
    changes_the_momentum: "removal_is_bit_equal",
    no_effect: "training_has_an_effect",
    mixes_samples: "samples_stay_apart",
    group_inside_the_branch: "skips_remain_if_all_branches_are_dropped",
}


def model() -> nn.Module:
    torch.manual_seed(0)
    small = Small()
    small.unused = nn.Linear(2, 2)
    return small


def test_a_right_recipe_passes() -> None:
    check_recipe(branches(), model(), IMAGES)


@pytest.mark.parametrize("cls", BROKEN, ids=lambda cls: cls.__name__)
def test_a_broken_recipe_fails_the_check_of_what_is_broken(cls: type[branches]) -> None:
    with pytest.raises(AssertionError, match=BROKEN[cls]):
        dict(recipe_checks(cls(), model(), IMAGES))[BROKEN[cls]]()


def test_every_check_has_a_broken_recipe() -> None:
    assert {name for name, _ in recipe_checks(branches(), model(), IMAGES)} == {*BROKEN.values()}

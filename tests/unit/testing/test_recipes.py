"""`check_recipe`: a right recipe passes, and wrong ones fail the check of what is wrong.

tests/integration/models/test_recipe_conformance.py checks hookdrop's recipes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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


def broken(name: str, **changes: Any) -> type[branches]:
    """A recipe like `branches` with other methods; pickle finds it in this module."""
    cls = dataclass(frozen=True, eq="__eq__" not in changes)(
        type(name, (branches,), {"__module__": __name__, **changes})
    )
    globals()[name] = cls
    return cls


CALLS: list[int] = []


def another_rate_each_time(one: Any) -> Regularizer:
    CALLS.append(1)
    return DropPath(one.p / len(CALLS))


def writes_to_weights(one: Any, model: Any, survey: Any) -> Sequence[RecipeSite]:
    model.fc.bias.data.add_(1.0)
    return sites(one, model, survey)


def changes_the_momentum(one: Any, model: Any, survey: Any) -> Sequence[RecipeSite]:
    model.layer1[0].bn1.momentum *= 0.5
    return sites(one, model, survey)


def group_inside_the_branch(one: Any, model: Any, survey: Any) -> Sequence[RecipeSite]:
    return [RecipeSite(branch.end, one.regularizer(), group=f"{branch.layer}.conv2") for branch in survey.branches]


def never_called(one: Any, model: Any, survey: Any) -> Sequence[RecipeSite]:
    return [*sites(one, model, survey), RecipeSite("unused", DropPath(one.p))]


sites = branches.sites
BROKEN: dict[type[branches], str] = {
    broken("never_equal", __eq__=lambda one, other: one is other, __hash__=object.__hash__): "has_a_text_form",
    broken("another_rate", regularizer=another_rate_each_time): "has_a_spec",
    broken("by_chance", sites=lambda *all: sites(*all)[int(torch.rand(()) < 0.5) :]): "planning_changes_nothing",
    broken("with_a_layer_that_is_never_called", sites=never_called): "sites_are_called",
    broken("writing_to_weights", sites=writes_to_weights): "eval_is_bit_equal",
    broken("active_at_rate_0", regularizer=lambda one: ScaleActivationGrad(0.5)): "rate_0_is_bit_equal",
    broken("changing_the_momentum", sites=changes_the_momentum): "removal_is_bit_equal",
    broken("no_effect", regularizer=lambda one: DropPath(0.0)): "training_has_an_effect",
    broken("mixing_samples", regularizer=lambda one: MixesSamples(one.p)): "samples_stay_apart",
    broken("group", sites=group_inside_the_branch): "skips_remain_if_all_branches_are_dropped",
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

"""A recipe is a value that `inject` and `plan` take like a regularizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from torch import nn

from hookdrop import Dropout, LayerError, LinearSchedule, find, inject, plan
from hookdrop.recipes.base import Recipe, RecipeSite


@dataclass(frozen=True)
class every_linear(Recipe):
    """A toy recipe: two groups of two sites."""

    p: float = 0.2

    def sites(self, model: nn.Module, survey: Any) -> Sequence[RecipeSite]:
        return [
            RecipeSite(name, Dropout(self.p), factor=0.5, group=name.partition(".")[0])
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear)
        ]


def blocks() -> nn.Module:
    """Two blocks with two Linear layers each."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)))


class TestRecipe:
    def test_it_takes_the_arguments_of_inject(self) -> None:
        model = blocks()
        drop = inject(model, every_linear(), p_scale="depth", schedule=LinearSchedule(steps=2), exclude="1.1")
        drop.step(2)
        assert {site.name: site.p for site in drop.sites} == pytest.approx({"0.0": 0.05, "0.1": 0.05, "1.0": 0.1})
        assert drop.name == "every_linear"

    def test_exclude_takes_names_of_groups(self) -> None:
        assert [site.name for site in plan(blocks(), every_linear(), exclude="0").sites] == ["1.0", "1.1"]

    def test_it_refuses_to_remove_all_sites(self) -> None:
        with pytest.raises(LayerError):
            plan(blocks(), every_linear(), exclude="*")

    @pytest.mark.parametrize("argument", [{"layers": "0"}, {"at": "input"}, {"tensor": 0}])
    def test_it_chooses_its_own_layers(self, argument: dict[str, Any]) -> None:
        model = blocks()
        with pytest.raises(TypeError, match="chooses its layers"):
            inject(model, every_linear(), **argument)
        assert not find(model)

"""A recipe checks its rate when it is made, before a model runs."""

from typing import Any

import pytest

import hookdrop.recipes


@pytest.mark.parametrize("name", hookdrop.recipes.RECIPE_NAMES)
def test_a_rate_out_of_range_raises_when_the_recipe_is_made(name: str) -> None:
    recipe: Any = getattr(hookdrop.recipes, name)
    with pytest.raises(ValueError, match=r"(p|alpha) must lie in .*, got -1"):
        recipe(-1)

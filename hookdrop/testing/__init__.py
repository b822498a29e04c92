"""Check that a regularizer or a recipe of your own keeps what hookdrop promises; import it in tests only."""

from hookdrop.testing.recipes import check_recipe, recipe_checks
from hookdrop.testing.regularizers import check_regularizer, regularizer_checks

__all__ = ["check_recipe", "check_regularizer", "recipe_checks", "regularizer_checks"]

"""What a recipe is: a value that chooses the sites of a model, and does not place anything."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from hookdrop.core.arguments import NamedArguments
from hookdrop.core.regularizer import Regularizer


@dataclass(frozen=True)
class RecipeSite:
    """One site of a recipe: a layer with its regularizer, or a rate of the dropout that the model already has."""

    name: str
    """Full name of the layer, without wrappers; `""` is the model itself."""
    regularizer: Regularizer | None
    """None for a dropout that the model already has; `attribute` and `p` describe it."""
    factor: float = 1.0
    """The recipe's own factor of the rate, such as 0.25 for DropBlock's group 3."""
    group: str = ""
    """Full name of the block that the site belongs to, if any. `p_scale` gives the sites of a group one factor."""
    at: str = ""
    """`"output"`, `"input"`, or `"skip"` for an identity skip; empty for the regularizer's usual place."""
    branch: str = ""
    """For `at="skip"`: the first layer of the residual branch, relative to this layer."""
    attribute: str = ""
    """For a dropout that the model already has: the layer's attribute with its rate, and `p`, the new rate."""
    p: float | None = None
    constant: float | None = None
    """The rate, where it is a number in the code: `attribute` is then the function that drops, and there is no `p`."""
    label: str = ""
    """The name that `plan` and the handle show; empty for `name`."""


class Recipe(metaclass=NamedArguments):
    """A placement from a paper, as a value with a text form: `inject(model, stochastic_depth(p=0.2))`.

    Subclasses are frozen dataclasses with lower-case names. Their `repr` is the text that `parse` reads.
    """

    p_scale: ClassVar[str | None] = None
    """What `inject(p_scale=None)` means for this recipe, such as `"depth_from_zero"`."""
    takes_all: ClassVar[bool] = True
    """Whether equal blocks should have equal sites, so that the plan names others. False to take some on purpose."""

    @abstractmethod
    def sites(self, model: nn.Module, survey: Any) -> Sequence[RecipeSite]:
        """Return the sites, in the order of the model.

        `model` has no wrappers, and runs when the recipe first reads an attribute of `survey`.

        Raises:
            LayerError: the model has no such sites.
            InjectionError: the model already has this regularization.
        """

    def warnings(self, model: nn.Module, survey: Any, sites: Sequence[RecipeSite]) -> Sequence[str]:
        """Return what the plan should warn about, such as layers that the recipe had to leave out."""
        return ()

    def groups(self, model: nn.Module, survey: Any, sites: Sequence[RecipeSite]) -> Sequence[str]:
        """Return the names of all groups, the first of the model first. `p_scale` counts them, also without sites."""
        return list(dict.fromkeys(site.group or site.name for site in sites))

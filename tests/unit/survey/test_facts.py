"""A survey is kept while the model, its settings and the example stay the same, and leaves nothing in the model."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from hookdrop import HeadDropout, InjectionError, find, inject, plan
from hookdrop.recipes import head_dropout, residual_dropout, stochastic_depth
from hookdrop.survey.facts import survey
from tests.support.models import toy

X = torch.randn(2, 8)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.relu(self.a(self.norm(x))))


class Routed(nn.Module):
    """Runs `late` only with `both`, an argument and a setting; defined before `early`."""

    def __init__(self) -> None:
        super().__init__()
        self.late, self.early, self.both = Block(), Block(), False

    def forward(self, x: Tensor, both: bool = False) -> Tensor:
        x = self.early(x)
        return self.late(x) if both or self.both else x


def ends(model: nn.Module, example: Any) -> list[str]:
    return [branch.end for branch in survey(model, example).branches]


def test_surveys_again_with_other_arguments_or_settings() -> None:
    model = Routed()
    assert survey(model, X) is survey(model, X + 1)
    assert ends(model, X) == ends(model, (X, False)) == ["early.b"]
    assert ends(model, (X, True)) == ends(model, {"x": X, "both": True}) == ["early.b", "late.b"]
    model.both = True
    assert ends(model, X) == ["early.b", "late.b"]
    model.forward = lambda x: model.late(x)  # type: ignore[method-assign, assignment, misc]
    assert ends(model, X) == ["late.b"]


def test_heads_are_those_of_the_current_settings() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        q, k, v = m.qkv(x).unflatten(-1, (3, m.heads, -1)).permute(2, 0, 3, 1, 4)
        return m.proj(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))

    model, tokens = toy(forward, heads=4, qkv=nn.Linear(8, 24), proj=nn.Linear(8, 8)), torch.randn(2, 5, 8)
    plan(model, head_dropout(p=0.5), example_input=tokens)
    model.heads = 2
    [site] = plan(model, head_dropout(p=0.5), example_input=tokens).sites
    assert isinstance(site.regularizer, HeadDropout)
    assert site.regularizer.heads == 2


def test_nothing_that_a_forward_creates_stays() -> None:
    class Creates(Block):
        def __init__(self) -> None:
            super().__init__()
            self.cache: Any = OrderedDict()
            self.counts: Any = defaultdict(list)

        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "head"):
                self.head, self.gain = nn.Linear(8, 3), nn.Parameter(torch.ones(3))
            if "one" not in self.cache:
                self.cache["one"] = torch.ones(8)
            self.counts["x"].append(x)
            return self.head(super().forward(x) + self.cache["one"]) * self.gain

    model = Creates()
    before = list(model.state_dict())
    inject(model, stochastic_depth(p=0.5), p_scale="equal", example_input=X)
    assert list(model.state_dict()) == before
    assert not model.cache
    assert not model.counts
    assert not isinstance(model(X), FakeTensor)


@pytest.mark.parametrize("recipe", [stochastic_depth(p=0.5), residual_dropout(p=0.5)])
def test_blocks_that_share_the_end_of_their_branch_raise(recipe: Any) -> None:
    model = nn.Sequential(Block(), Block(), Block())
    model[1].b = model[0].b
    with pytest.raises(InjectionError, match="share '0.b'"):
        plan(model, recipe, p_scale="equal", example_input=torch.randn(2, 3, 8))


def test_spec_of_all_injections_places_a_recipe_again() -> None:
    """`find` has the order of the definition, and a recipe that of the execution."""
    example = (X, True)
    inject(model := Routed(), stochastic_depth(p=0.3), example_input=example).target_p = 0.6
    spec = find(model).spec
    drop = inject(Routed(), spec, example_input=example)
    assert drop.target_p == 0.6
    assert sorted(site.name for site in drop.sites) == ["early.b", "late.b"]


class Cache:
    """A plain object, as a model may share with its layers."""

    def __init__(self) -> None:
        self.mask: Any = None
        self.by_size: dict[int, Any] = {}
        self.inner: Any = None


MASKS: dict[int, Tensor] = {}
SHARED = Cache()


class Caching(Block):
    """Keeps masks in nested objects, in a class attribute, and in globals."""

    of_class: ClassVar[dict[int, Tensor]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.cache = SimpleNamespace(nested=Cache())

    def forward(self, x: Tensor) -> Tensor:
        for cache in (self.cache.nested, SHARED):
            if cache.mask is None:
                cache.mask, cache.inner = torch.ones(8), Cache()
                cache.inner.mask = cache.by_size[8] = cache.mask * 2
        for table in (self.of_class, MASKS):
            x = x * table.setdefault(8, torch.ones(8))
        return super().forward(x) * self.cache.nested.by_size[8] * SHARED.inner.mask


def test_no_fake_tensor_stays_in_objects_and_globals() -> None:
    model = Caching()
    inject(model, stochastic_depth(p=0.5), p_scale="equal", example_input=X).remove()
    assert type(model(X)) is Tensor
    kept = [SHARED.mask, SHARED.inner.mask, *SHARED.by_size.values(), *MASKS.values(), *Caching.of_class.values()]
    assert {type(mask) for mask in kept} == {Tensor}
    survey(model, torch.randn(3, 8)).branches  # noqa: B018
    assert SHARED.mask is kept[0], "what holds no fake tensors stays"

"""The properties of a recipe in a model: the name and the docstring of each check say what must hold."""

from __future__ import annotations

import copy
import json
import pickle
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from hookdrop.core.errors import HookdropWarning
from hookdrop.core.handle import Injection, find
from hookdrop.core.inject import inject, plan
from hookdrop.core.recipe import Recipe
from hookdrop.core.spec import InjectionSpec
from hookdrop.core.tensor_tree import first_tensor, map_leaves, tensors
from hookdrop.core.text import read, text_of
from hookdrop.survey.facts import survey
from hookdrop.survey.isolation import call
from hookdrop.testing.regularizers import NONE, Checks, Failures, bound, exactly, only_if, run_all


def check_recipe(recipe: Recipe, model: nn.Module, example: Any, expected_failures: Failures = NONE) -> None:
    """Check what the sites of a recipe mean in a model, which does not change.

    Args:
        recipe: a value such as `stochastic_depth(p=0.2)`.
        model: a small model, of which the checks train copies.
        example: an input with at least two different samples: a tensor, a tuple of arguments or a dict.
        expected_failures: names of checks to leave out, each with the reason.

    Raises:
        AssertionError: the recipe lacks properties; the message has all of them.

    Example:
        >>> from torchvision.models import resnet18
        >>> model, images = resnet18(num_classes=2), torch.randn(2, 3, 32, 32)
        >>> check_recipe(recipes.stochastic_depth(p=0.2), model, images)
    """
    run_all(recipe_checks(recipe, model, example, expected_failures))


def recipe_checks(recipe: Recipe, model: nn.Module, example: Any, expected_failures: Failures = NONE) -> Checks:
    """Return the checks of `check_recipe` as (name, function), for `pytest.mark.parametrize`."""
    return bound(RecipeChecks(recipe, model, example), expected_failures)


class RecipeChecks:
    """The checks of a recipe in one model."""

    def __init__(self, recipe: Recipe, model: nn.Module, example: Any) -> None:
        self._recipe, self._model, self._example, self._title = recipe, model, example, repr(recipe)
        self._sites = recipe.sites(model, found := survey(model, example))
        self._hooks = all(site.regularizer is not None for site in self._sites)
        ends = {branch.end for branch in found.branches} if self._hooks else set()
        inside = [site.at == "skip" or getattr(site.regularizer, "only_at", "") == "scores" for site in self._sites]
        self._in_branches = not any(inside) and all(site.name in ends for site in self._sites)
        rates = [site.regularizer.rate for site in self._sites if site.regularizer is not None]
        self._drops_all = all(rate is not None and rate.kind == "drop" and not rate.open_end for rate in rates)

    def _injected(self, spec: InjectionSpec | None = None, **settings: Any) -> tuple[nn.Module, Injection]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HookdropWarning)
            spec = spec or InjectionSpec(self._recipe, **settings)
            return (model := self._clean()), inject(model, spec, example_input=self._example)

    def _clean(self) -> nn.Module:
        return copy.deepcopy(self._model).train()

    def _output(self, model: nn.Module, example: Any = None) -> Tensor:
        """Return the first tensor of a forward from a fixed seed."""
        torch.manual_seed(5)
        return first_tensor(call(model, self._example if example is None else example))

    def _step(self, model: nn.Module) -> dict[str, Tensor]:
        """Return output, gradients and buffers of a training step."""
        torch.autograd.backward((y := self._output(model)).float().square().mean())
        gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
        return {"output": y.detach(), **gradients, **dict(model.named_buffers())}

    def has_a_text_form(self) -> None:
        """Its text, a copy and a pickle must each be the same value."""
        text = read(text_of(self._recipe), [type(self._recipe)])
        again = [text, copy.deepcopy(self._recipe), pickle.loads(pickle.dumps(self._recipe))]
        assert again == [self._recipe] * 3, f"they are {again}"

    def has_a_spec(self) -> None:
        """The spec of the injection must go through JSON, and choose the same sites at the same rates."""
        pairs = [self._injected()]
        settings = json.loads(json.dumps(pairs[0][1].spec.to_dict()))
        pairs.append(self._injected(InjectionSpec.from_dict(settings, allow=[type(self._recipe)])))
        assert pairs[0][1].sites == pairs[1][1].sites, f"{pairs[1][1].sites}\ninstead of\n{pairs[0][1].sites}"

    def planning_changes_nothing(self) -> None:
        """`plan` must leave weights, buffers, modes and random numbers as they are, and choose the same sites again."""
        model = self._clean()
        states = [*model.state_dict().values(), torch.get_rng_state()]
        before = [state.clone() for state in states]
        first, second = (plan(model, self._recipe, example_input=self._example) for _ in range(2))
        assert [site.name for site in first.sites] == [site.name for site in second.sites], f"{first}\n{second}"
        exactly([*states[:-1], torch.get_rng_state()], before)
        assert all(module.training for module in model.modules()), "a module is in eval mode"

    @only_if(lambda self: self._hooks)
    def sites_are_called(self) -> None:
        """A forward in training mode must call each site."""
        model, drop = self._injected()
        self._output(model)
        assert all(site.called for site in drop.sites), f"\n{drop.sites}"

    def eval_is_bit_equal(self) -> None:
        """In eval mode, the model must return what it returns without the recipe."""
        model, _ = self._injected()
        exactly(self._output(model.eval()), self._output(self._clean().eval()))

    @only_if(lambda self: self._hooks)
    def rate_0_is_bit_equal(self) -> None:
        """At the start of a ramp, a training step must be that of the model without the recipe."""
        model, _ = self._injected(schedule="LinearSchedule(steps=10)")
        exactly(self._step(model), self._step(self._clean()))

    def removal_is_bit_equal(self) -> None:
        """After `remove()`, a training step must be that of the model without the recipe."""
        model, drop = self._injected()
        drop.remove()
        exactly(self._step(model), self._step(self._clean()))
        assert not find(model), f"there still is {find(model)}"

    def training_has_an_effect(self) -> None:
        """A training step must differ, but each parameter that has a gradient must keep one, and it must be finite."""
        found, expected = self._step(self._injected()[0]), self._step(self._clean())
        lost = [name for name in expected if name not in found or not found[name].isfinite().all()]
        assert not lost, f"no finite gradient: {lost}"
        assert not all(torch.equal(found[name], expected[name]) for name in expected), "nothing differs"

    @only_if(lambda self: self._hooks)
    def samples_stay_apart(self) -> None:
        """If one sample is replaced, no other may change: numbers are drawn for samples, and not for other rows."""
        model, drop = self._injected()
        size = max((len(x) for x in tensors(self._example) if x.dim()), default=0)

        def replaced(leaf: Any) -> Any:
            return leaf[[1, *range(1, size)]] if isinstance(leaf, Tensor) and leaf.shape[:1] == (size,) else leaf

        with drop.sampling():
            example = map_leaves(self._example, replaced)
            found, expected = (self._output(model.eval(), one)[1:] for one in (example, self._example))
        torch.testing.assert_close(found, expected)

    @only_if(lambda self: self._hooks and self._in_branches and self._drops_all)
    def skips_remain_if_all_branches_are_dropped(self) -> None:
        """If all sites are dropped, the output must still depend on the input of the first block, through its skip."""
        model, drop = self._injected()
        inputs: list[Tensor] = []
        block = model.get_submodule(self._sites[0].group or self._sites[0].name)
        block.register_forward_pre_hook(lambda module, *given: inputs.append(first_tensor(given)), with_kwargs=True)
        with drop.sampling(p=1.0):
            y = self._output(model.eval())
        (gradient,) = torch.autograd.grad(y.float().square().sum(), inputs[0])
        assert gradient.any(), "it does not"

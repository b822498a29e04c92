"""The survey of a model: what one forward of an example shows, for recipes, plans and checks."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hookdrop.core.errors import InjectionError
from hookdrop.core.selection import named_layers, unwrapped
from hookdrop.core.tensor_tree import TensorKey, map_leaves, tensors
from hookdrop.core.torch_internals import is_fake
from hookdrop.survey.branches import Branch, find_branches, find_gaps
from hookdrop.survey.draws import Line, find_draws
from hookdrop.survey.drop_rates import DropRates, at_zero, constants_in, find_drop_rates, known_drop_rates
from hookdrop.survey.examples import Example, examples, fault_of
from hookdrop.survey.heads import Heads, Scores, find_heads, find_scores
from hookdrop.survey.isolation import Training, forked_rng, other_hooks
from hookdrop.survey.layers import LayerCalls, find_skippable, find_streams, layer_calls
from hookdrop.survey.record import record
from hookdrop.survey.residuals import Residual, find_residuals
from hookdrop.survey.samples import Samples, Site, growing_axis, is_batched, row_orders, why_no_batch
from hookdrop.survey.tokens import Patches, find_embeddings, find_patches, removable_patches
from hookdrop.survey.trace import Call, Node, Trace

if TYPE_CHECKING:
    from hookdrop.survey.subsets import Subset


class Survey:
    """What running a model shows. Each analysis runs when it is first read; names are without wrappers."""

    def __init__(self, model: nn.Module, example: Example, trace: Trace, is_fake: bool) -> None:
        self._model = weakref.ref(model)
        self.example = example
        self.is_fake = is_fake
        """Whether the traces have shapes but no values."""
        self.trace = trace
        """The forward with the batch size of the example."""
        self._tokens: dict[str, Patches | str] = {}
        self._resized: dict[int, tuple[Trace, Trace]] = {}
        self._orders: dict[int, dict[Site, bool | str]] = {}
        self._subsets: dict[Any, Subset] = {}

    @property
    def model(self) -> nn.Module:
        """The model."""
        model = self._model()
        if model is None:
            raise InjectionError("the surveyed model no longer exists.")
        return model

    @property
    def layers(self) -> Mapping[str, list[Call]]:
        """The calls of the layers in the forward, by full name, in the order of their first calls."""
        return self.trace.calls_of

    @cached_property
    def heads(self) -> Mapping[str, Heads | str]:
        """The heads by the name of the layer whose input has them side by side, the output projection of attention.

        Other layers that follow attention have the reason why they have none.
        """
        with _fixed_seed():
            return find_heads(self.trace)

    @cached_property
    def scores(self) -> Mapping[str, Scores | str]:
        """The scores by the innermost module that computes attention, in the order of execution.

        Other modules that multiply the result of a softmax have the reason why they have none.
        """
        with _fixed_seed():
            return find_scores(self.trace)

    def samples(self, name: str, at: str = "output") -> Samples | str:
        """Return where the samples of the batch are in the first tensor of a layer, or why this is unknown."""
        if isinstance(axis := self.batch_axis, str):
            return axis
        try:
            found = growing_axis(*self._two_and_three(axis), name, at)
            if isinstance(found, str) or found.per_sample == 1:
                return found
            interleaved = self._row_orders(axis)[name, at] if self._has_values else _NO_VALUES
        except InjectionError:
            return "the model does not run on the example with 2 and 3 samples"
        return interleaved if isinstance(interleaved, str) else replace(found, interleaved=interleaved)

    @cached_property
    def batch_axis(self) -> int | str:
        """The axis of the example with the samples, 0 or 1, or why there is none; 0 if this cannot be tried."""
        if not self._has_values:
            return 0
        reasons, batched = dict[int, str](), is_batched(self.trace)
        rows = [node.shape[0] for node in self.trace.outputs if len(node.shape) > 1]
        if batched and self.example.batch in rows:
            return 0  # with a row of the output for each sample
        for axis in (0, 1):
            try:
                orders = {} if batched and axis == 0 else self._row_orders(axis)
                reasons[axis] = why_no_batch(orders, *self._two_and_three(axis))
            except InjectionError:  # such as the images of a detector, which are a list
                if batched:
                    break
                continue
            if not reasons[axis]:
                return axis
        if 0 not in reasons:
            return 0
        faults = "; ".join(f"axis {axis}: {reason}" for axis, reason in reasons.items())
        return f"no axis of the example has independent samples ({faults})"

    @cached_property
    def _has_values(self) -> bool:
        given = [*self.model.parameters(), *tensors(self.example.value)]
        return not any(x.is_meta or is_fake(x) for x in given)

    def _two_and_three(self, axis: int) -> tuple[Trace, Trace]:
        """The forward passes with two and with three samples on an axis of the example."""
        if axis not in self._resized:
            example = replace(self.example, axis=axis)
            traces = {example.batch: self.trace}
            for size in {2, 3} - {example.batch}:
                traces[size] = record(self.model, example.resized(size), fake=self.is_fake)
            self._resized[axis] = traces[2], traces[3]
        return self._resized[axis]

    def _row_orders(self, axis: int) -> dict[Site, bool | str]:
        if axis not in self._orders:
            example = replace(self.example, axis=axis)
            self._orders[axis] = row_orders(self.model, example, *self._two_and_three(axis))
        return self._orders[axis]

    @cached_property
    def patches(self) -> Patches | str:
        """The tokens of image patches, or why there are none, or why later layers need all of them."""
        layer = find_patches(self.trace)
        none = "it has no tensor (N, L, C) of image patches from which all else is computed"
        return self._removable(layer) if layer else none

    def why_tokens_stay(self, layer: str) -> str:
        """Return why later layers need all tokens (N, L, C) that a layer returns; empty if they do not."""
        found = self._removable(layer)
        return found if isinstance(found, str) else ""

    def _removable(self, layer: str) -> Patches | str:
        if not self._has_values:
            return _NO_VALUES
        if layer not in self._tokens:
            with at_zero(self.model, self.all_drop_rates.rates):
                self._tokens[layer] = removable_patches(self.model, self.example.varied((0, 1)), layer)
        return self._tokens[layer]

    @cached_property
    def token_embeddings(self) -> list[str]:
        """The layers that look up the tokens that the model is called with, in the order of execution."""
        return find_embeddings(self.trace, tensors(self.example.value))

    def calls(self, name: str, at: str = "output", tensor: TensorKey = None) -> LayerCalls:
        """Return the calls of a layer, as a hook with these settings would see them."""
        calls = self.layers.get(name, [])
        if at == "scores":
            scores = self.scores.get(name)
            return LayerCalls(len(calls), list(dict.fromkeys(scores.shapes if isinstance(scores, Scores) else ())))
        return layer_calls(self.trace, self.residuals, calls, at, tensor)

    @cached_property
    def branches(self) -> tuple[Branch, ...]:
        """The residual branches, in the order of execution."""
        return find_branches(self.trace, self.residuals)

    @cached_property
    def gaps(self) -> tuple[Mapping[str, str], tuple[Call, ...]]:
        """The layers with a branch that no hook can drop, each with the reason, and the attention in no branch."""
        return find_gaps(self.trace, self.residuals)

    @cached_property
    def skippable(self) -> Mapping[str, str]:
        """The layers around residual branches, by full name; empty if one is its input plus branches, or why not."""
        return find_skippable(self.trace, self.residuals, self.branches)

    def streams(self, name: str) -> list[list[str]]:
        """Return the arguments of a layer to which branches are added, for each output that is such a sum."""
        return find_streams(self.layers.get(name, []))

    def runs_on(
        self, name: str, tensor: TensorKey, argument: str | None = None, *, writes: bool = False, discards: bool = False
    ) -> str:
        """Return on which samples a layer runs if a regularizer keeps some of them (`discards`: all or none).

        `argument` is the one with the samples; None for the first. See `find_subset` for the rest.
        """
        from hookdrop.survey.subsets import subset_of_call  # only this needs it

        if name not in self.layers or not self._has_values:
            return ""
        call, arguments = self.layers[name][-1], repr(map_leaves(self.layers[name][-1].arguments, _shape))
        # Equal layers share a result, but a layer with another library's hook may behave differently.
        alone = name if other_hooks(self.model.get_submodule(name)) else ""
        key = self.trace.kinds[name], alone, arguments, argument, tensor, writes
        if key not in self._subsets:
            with _fixed_seed():
                found = subset_of_call(self.model.get_submodule(name), call, argument, tensor, writes=writes)
            self._subsets[key] = found
        why = self._subsets[key].why_all(discards)
        return f"on all samples: {why}" if why else "on kept samples"

    @cached_property
    def residuals(self) -> list[Residual]:
        """The residual additions, in the order of execution."""
        return find_residuals(self.trace)

    @cached_property
    def drop_rates(self) -> DropRates:
        """The dropout that the model already has, without rates of 0 at which it skips the drop.

        A model that does not run in training mode has its modules only.
        """
        return self._find_drop_rates(skipped=False)

    @cached_property
    def all_drop_rates(self) -> DropRates:
        """The same with these rates of 0."""
        return self._find_drop_rates(skipped=True)

    def _find_drop_rates(self, skipped: bool) -> DropRates:
        for fake in (True, False):
            try:
                found = find_drop_rates(self.model, self.example.value, fake=fake, skipped=skipped)
                active = constants_in(self.trace)  # in eval mode too, so that they need no sampling
                return replace(found, runners={one: at for one, at in found.runners.items() if one not in active})
            except InjectionError as error:
                reason = str(error).partition("\n")[2].partition("\n")[0].strip()
        missed = f"functional dropout, as the model does not run in training mode: {reason}"
        return DropRates(tuple(known_drop_rates(self.model)), {missed: ()})

    @cached_property
    def draws(self) -> Mapping[Line, list[str]]:
        """The lines of code that draw random numbers on which the output depends, in training mode at drop rates of 0.

        Not those of drops whose rate is in the code. Without values, or if the model does not run in training mode, an
        `InjectionError`.
        """
        known = [(one.layer, one.attribute) for one in self.all_drop_rates.constants]
        with at_zero(self.model, self.all_drop_rates.rates):
            return self._draws(True, known)

    @cached_property
    def draws_in_eval_mode(self) -> Mapping[Line, list[str]]:
        """The same in eval mode, and at the rates of the model. Modules that stay in training mode do so here."""
        return self._draws(() if self.model.training else [one for one in self.model.modules() if one.training])

    def _draws(self, training: Training, known: Collection[tuple[str, str]] = ()) -> Mapping[Line, list[str]]:
        if not self._has_values:
            raise InjectionError(_NO_VALUES)
        return find_draws(self.model, self.example.value, training, known)


@contextmanager
def _fixed_seed() -> Iterator[None]:
    """Draw the same numbers each time, so that a plan depends on the model alone, and leave the user's RNG as it is."""
    with forked_rng():
        torch.manual_seed(0)
        yield


_NO_VALUES = "this takes values, and the model or the example has none (a meta device or fake tensors)"
_CACHE: weakref.WeakKeyDictionary[nn.Module, tuple[Any, Survey]] = weakref.WeakKeyDictionary()


def survey(model: nn.Module, example_input: Any = None) -> Survey:
    """Run a model on an example, and return what it shows.

    The model runs in eval mode without gradients, and everything is restored. Its tensors have shapes but no values
    where that suffices. The result is cached until a module is replaced, a setting of one changes (its attributes that
    are numbers or strings) or a hook of other code, or the shapes of the example or its other arguments change.

    Args:
        model: the model, possibly inside wrappers.
        example_input: a tensor, a tuple of arguments or a dict of keyword arguments. None uses what the library of the
            model offers (timm's input size, the `dummy_inputs` of transformers), or assumes an image of 3 x 224 x 224
            if the model begins with a convolution of 3 channels.

    Raises:
        InjectionError: the model does not accept the example, or needs `example_input`.
    """
    model = unwrapped(model)
    structure = [(layer.name, weakref.ref(layer.module), _settings(layer.module)) for layer in named_layers(model)]
    key = structure, [*map(id, other_hooks(model))], repr(map_leaves(example_input, _shape))
    if model not in _CACHE or _CACHE[model][0] != key:
        _CACHE[model] = key, _survey(model, example_input)
    return _CACHE[model][1]


def _settings(module: nn.Module) -> list[Any]:
    own = vars(module)
    plain = [(key, own[key]) for key in own if type(own[key]) in (bool, int, float, str) and key != "training"]
    return [*plain, id(own.get("forward"))]


def _shape(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return type(leaf).__name__, tuple(leaf.shape), leaf.dtype, leaf.device
    return (leaf.shape, leaf.dtype) if isinstance(leaf, Node) else leaf


def _survey(model: nn.Module, given: Any) -> Survey:
    for example in examples(model, given):
        # Values only if the model needs them, and never for an input that may be the wrong one.
        for fake in (True,) if example.is_assumed else (True, False):
            try:
                trace = record(model, example.value, fake=fake)
            except InjectionError as error:
                if given is not None and not fake:
                    if fault := fault_of(given, partial(record, model)):
                        error.args = (str(error).rpartition("\n")[0] + f"\n  {fault}",)
                    raise
                continue
            if not example.is_assumed or _begins_with_image_convolution(trace):
                return Survey(model, example, trace, fake)
    raise InjectionError(
        f"this needs an example input for {type(model).__name__}, to see what its layers compute.\n"
        "  pass one: example_input=x, a tensor, a tuple of arguments or a dict of keyword arguments"
    )


def _begins_with_image_convolution(trace: Trace) -> bool:
    first = next((op for op in trace.ops if any(node.leaf == "weight" for node in op.inputs)), None)
    return first is not None and first.name == "conv2d" and first.inputs[0].is_data and first.inputs[1].shape[1] == 3


class LazySurvey:
    """The survey of a model, which runs when a recipe first reads an attribute of it."""

    def __init__(self, model: nn.Module, example_input: Any) -> None:
        self._arguments = model, example_input
        self.is_given = example_input is not None
        self.found: Survey | None = None
        """None if the recipe did not need it."""

    def __getattr__(self, name: str) -> Any:
        if self.found is None:
            self.found = survey(*self._arguments)
        return getattr(self.found, name)

"""From what a person asks for to a list of sites, each with a regularizer and a factor of its own."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from hookdrop.errors import InjectionError, LayerError
from hookdrop.injection.scale import PScale, factors
from hookdrop.injection.select import Entries, Entry, Layer, Selection, as_entries, entry_text, select
from hookdrop.regularizers import Regularizer, as_regularizer, must_pickle, parse
from hookdrop.schedules import Schedule
from hookdrop.utils.tables import counted, some
from hookdrop.utils.validation import number

Source: TypeAlias = Regularizer | nn.Module | Callable[[Tensor], Tensor] | str
Regularizers: TypeAlias = Source | Mapping[Any, Source]


@dataclass
class PlannedSite:
    """One layer that is going to be hooked."""

    name: str
    type: str
    module: nn.Module = field(repr=False)
    regularizer: Regularizer | None
    """Of all sites of an entry; each hook is given a copy."""
    p_scale: float = 1.0
    at: str = "output"
    """`"output"` or `"input"` of the layer, or the identity `"skip"` around its residual branch."""
    branch: str = ""
    """Where that branch begins: the name of its first layer within this one."""
    shape: tuple[int, ...] | None = None
    """Shape of the tensor to regularize; None without `example_input`."""
    calls: int | None = None
    """Calls per forward; None without `example_input`."""
    reading: str = ""
    """How the regularizer reads the axes."""

    @property
    def p(self) -> float | None:
        """The target rate, `p_scale` included."""
        rate = None if self.regularizer is None else self.regularizer.rate
        return None if rate is None else rate * self.p_scale


@dataclass
class Resolved:
    """What was asked for, as sites."""

    sites: list[PlannedSite]
    counts: dict[str, int]
    exact: set[str]
    warnings: list[str]
    told: set[str] = field(default_factory=set)
    """The kinds of doubts about shapes that are among the warnings."""


def resolve(
    model: nn.Module,
    regularizer: Regularizers | None,
    layers: Entries | None,
    exclude: Entries | None,
    schedule: Schedule | None,
    p_scale: PScale | None,
    at: str = "output",
) -> Resolved:
    """Choose the layers and give each its regularizer; nothing is placed."""
    if schedule is not None:
        _must_be_a_schedule(schedule)
    regularizers, entries = _regularizers_and_entries(regularizer, layers)
    selection = select(model, entries, exclude)
    chosen, warnings = _called_layers(selection)
    if regularizer is None:  # layers are listed, and nothing is hooked
        warnings = []
    elif any(map(is_keras, map(type, model.modules()))):
        _must_not_be_keras(model, chosen)
    for entry in selection.unmatched_excludes:
        warnings.append(_unmatched_text(entry))
    sites = [
        PlannedSite(
            layer.name,
            type(layer.module).__name__,
            layer.module,
            _regularizer_of(layer, selection, regularizers, entries),
            at=at,
        )
        for layer in chosen
    ]
    if schedule is not None:
        must_pickle(schedule, "the schedule")
    if p_scale is not None:
        _scale(sites, factors(chosen, p_scale))
    _check_rates(sites, schedule, p_scale)
    return Resolved(sites, selection.counts, selection.exact, warnings)


def _regularizers_and_entries(
    regularizer: Regularizers | None, layers: Entries | None
) -> tuple[list[Regularizer | None], list[Entry]]:
    """A regularizer for each entry, or one for all."""
    if isinstance(regularizer, Mapping):
        if layers is not None:
            raise LayerError("give `layers` or a mapping of layers to regularizers, not both.")
        keys = [as_entries(key, "the mapping") for key in regularizer]
        if any(len(key) != 1 for key in keys):
            raise LayerError("each key of the mapping must be one entry: a name, a glob, a class, ...")
        entries = [key[0] for key in keys]
        return [_regularizer(value) for value in regularizer.values()], entries
    found = None if regularizer is None else _regularizer(regularizer)
    if layers is None:
        raise LayerError(
            "say where: layers=... (a name, a glob such as 'layer3.*', a class, a list of them).\n"
            '  see all:      print(hookdrop.plan(model, layers="**"))'
        )
    return [found], as_entries(layers, "layers")


def _regularizer(given: object) -> Regularizer:
    # A copy, so that what is done to the original does not change a plan; each hook is given another one.
    return copy.deepcopy(parse(given) if isinstance(given, str) else as_regularizer(given))


def _regularizer_of(
    layer: Layer, selection: Selection, regularizers: list[Regularizer | None], entries: list[Entry]
) -> Regularizer | None:
    if len(regularizers) == 1:
        return regularizers[0]
    by = selection.chosen_by[layer.name]
    if len(by) > 1:
        keys = " and ".join(entry_text(entries[i]) for i in by)
        raise LayerError(f"{layer.name!r} is under two keys of the mapping, {keys}: which regularizer should it get?")
    return regularizers[by[0]]


def _called_layers(selection: Selection) -> tuple[list[Layer], list[str]]:
    """The layers less those whose class has no forward (they are iterated, never called), and a warning of them."""
    for layer in selection.layers:
        if isinstance(layer.module, torch.jit.ScriptModule):
            raise InjectionError(
                f"{layer.name!r} is a ScriptModule, which can't carry Python hooks.\n"
                "  train it unscripted, and script it inside `with hookdrop.without_hooks(model):`."
            )
    called = [layer for layer in selection.layers if not _has_no_forward(layer.module)]
    if len(called) == len(selection.layers):
        return called, []
    others = [layer for layer in selection.layers if _has_no_forward(layer.module)]
    names = some([layer.name for layer in others])
    named = next((layer for layer in others if layer.name in selection.exact), None)
    if named is not None:
        raise LayerError(
            f"{named.name!r} is a {type(named.module).__name__}, which is never called: a hook on it never fires.\n"
            "  its owner iterates over it or uses its weights: hook what is inside of it, or its owner."
        )
    if not called:
        raise LayerError(
            f"`layers` matches only modules that are never called: {names}.\n"
            "  their owners iterate over them or use their weights: hook what is inside of them, or the owners."
        )
    return called, [f"skipped {counted(len(others), 'module')} that the model never calls (containers): {names}."]


def _has_no_forward(module: nn.Module) -> bool:
    # The projection inside MultiheadAttention is a module for its weights' sake only.
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return True
    return type(module).forward is nn.Module.forward and "forward" not in vars(module)


def _must_not_be_keras(model: nn.Module, chosen: list[Layer]) -> None:
    """Keras never puts its layers in eval mode: a hook would drop in `predict()` too."""
    keras = [module for module in model.modules() if is_keras(type(module))]
    # These alone switch what they hold.
    wrappers = [module for module in keras if type(module).__name__ == "TorchModuleWrapper"]
    inside = {id(part) for module in keras for part in module.modules()}
    switched = {id(part) for wrapper in wrappers for child in wrapper.children() for part in child.modules()}
    for layer in chosen:
        if id(layer.module) in inside - switched:
            raise InjectionError(
                f"{layer.name!r} ({type(layer.module).__name__}) belongs to a Keras layer.\n"
                "  Keras never puts its layers in eval mode: a hook would drop in predict() and evaluate() too.\n"
                "  use keras.layers.Dropout and its like, or hook PyTorch modules inside a "
                "keras.layers.TorchModuleWrapper, which switches their mode."
            )


def _is_keras(cls: type) -> bool:
    return any(base.__module__.startswith("keras.") for base in cls.__mro__)


is_keras: Callable[[type], bool] = lru_cache(maxsize=1024)(_is_keras)


def _unmatched_text(entry: Entry) -> str:
    # `exclude="layer4"` names one module, not what is inside it.
    inside = f"; what is inside: '{entry}.**'" if isinstance(entry, str) and "*" not in entry else ""
    return f"exclude {entry_text(entry)} matches none of the chosen layers{inside}."


def _scale(sites: list[PlannedSite], scales: list[float]) -> None:
    rateless = [site for site in sites if site.regularizer is not None and site.regularizer.rate is None]
    if rateless:
        raise InjectionError(f"p_scale: {rateless[0].regularizer!r} has no rate that could be scaled.")
    for site, factor in zip(sites, scales, strict=True):
        site.p_scale = number(factor, f"p_scale of {site.name!r}", "inject")
        if site.p_scale < 0:
            raise ValueError(f"inject: p_scale of {site.name!r} must be at least 0, got {site.p_scale:g}.")


def _check_rates(sites: list[PlannedSite], schedule: Schedule | None, p_scale: PScale | None) -> None:
    for site in sites:
        if site.regularizer is None:
            continue
        target = site.regularizer.rate
        if target is None:
            if schedule is not None:
                raise InjectionError(
                    f"the schedule has no rate to drive: {site.regularizer!r} has none of p, drop_prob, drop_rate.\n"
                    "  leave out schedule=, or hook what has one."
                )
            continue
        peak = 1.0 if schedule is None else schedule.peak
        rate = target * site.p_scale * (schedule(0) if peak is None and schedule is not None else peak or 0.0)
        try:
            site.regularizer.valid_rate(rate)
        except ValueError as error:
            times = f" x schedule {rate / (target * site.p_scale):g}" if math.isfinite(rate) and rate else ""
            raise ValueError(f"{error}\n  at {site.name!r}: p {target:g} x p_scale {site.p_scale:g}{times}.") from None


def _must_be_a_schedule(schedule: object) -> None:
    if isinstance(schedule, Schedule):
        return
    name = getattr(schedule, "__name__", "fn")
    if isinstance(schedule, type):
        write = f"{name}(steps=N)"
    else:
        write = f"LambdaSchedule({name})" if callable(schedule) else "LinearSchedule(steps=N)"
    raise TypeError(f"inject: schedule must be a hookdrop schedule, got {schedule!r}.\n  write: schedule={write}")

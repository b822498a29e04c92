"""From what a person asks for to a list of sites, each with a regularizer and a factor of its rate."""

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
from hookdrop.injection.select import Entries, Layer, Selection, as_entries, entry_text, matches, select
from hookdrop.regularizers import Regularizer, as_regularizer, check_picklable, parse
from hookdrop.schedules import Schedule
from hookdrop.utils.tables import counted, some
from hookdrop.utils.validation import number

Source: TypeAlias = Regularizer | nn.Module | Callable[[Tensor], Tensor] | str
Regularizers: TypeAlias = Source | Mapping[Any, Source]
PScale: TypeAlias = str | Mapping[Any, float] | Callable[[str, int, int], float]


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

    root: nn.Module
    """The model without its wrappers."""
    sites: list[PlannedSite]
    counts: dict[str, int]
    exact: set[str]
    warnings: list[str]


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
    if schedule is not None and not isinstance(schedule, Schedule):
        raise _not_a_schedule(schedule)
    regularizers, layers = _regularizers_and_layers(regularizer, layers)
    selection = select(model, layers, exclude)
    chosen, warnings = _called_layers(selection)
    if regularizer is None:  # layers are listed, and nothing is hooked
        warnings = []
    elif any(map(is_keras, map(type, model.modules()))):
        _must_not_be_keras(model, chosen)
    for entry in selection.unmatched_excludes:
        # `exclude="layer4"` names one module, not what is inside it.
        inside = f"; what is inside: '{entry}.**'" if isinstance(entry, str) and "*" not in entry else ""
        warnings.append(f"exclude {entry_text(entry)} matches none of the chosen layers{inside}.")
    sites = []
    for layer in chosen:
        by = selection.chosen_by[layer.name]
        if len(regularizers) > 1 and len(by) > 1:
            keys = " and ".join([entry_text(selection.entries[i]) for i in by])
            raise LayerError(
                f"{layer.name!r} is under two keys of the mapping, {keys}: which regularizer should it get?"
            )
        own = regularizers[by[0] if len(regularizers) > 1 else 0]
        sites.append(PlannedSite(layer.name, type(layer.module).__name__, layer.module, own, at=at))
    if schedule is not None:
        check_picklable(schedule, "the schedule")
    if p_scale is not None:
        _scale(sites, factors(chosen, p_scale))
    for site in sites:
        _check_rate(site, schedule)
    return Resolved(selection.root, sites, selection.counts, selection.exact, warnings)


def _regularizers_and_layers(
    given: Regularizers | None, layers: Entries | None
) -> tuple[list[Regularizer | None], Entries]:
    """A regularizer for each entry, or one for all, and the entries."""
    if isinstance(given, Mapping):
        if layers is not None:
            raise LayerError("give `layers` or a mapping of layers to regularizers, not both.")
        keys = [as_entries(key, "the mapping") for key in given]
        if any(len(key) != 1 for key in keys):
            raise LayerError("each key of the mapping must be one entry: a name, a glob, a class, ...")
        return [_regularizer(value) for value in given.values()], [key[0] for key in keys]
    found = None if given is None else _regularizer(given)
    if layers is None:
        raise LayerError(
            "say where: layers=... (a name, a glob such as 'layer3.*', a class, a list of them).\n"
            '  see all:      print(hookdrop.plan(model, layers="**"))'
        )
    return [found], layers


def _regularizer(given: object) -> Regularizer:
    # A copy, so that what is done to the original does not change a plan; each hook is given another one.
    return copy.deepcopy(parse(given) if isinstance(given, str) else as_regularizer(given))


def _called_layers(selection: Selection) -> tuple[list[Layer], list[str]]:
    """The layers less those whose class has no forward (they are iterated, never called), and a warning of them."""
    called: list[Layer] = []
    others: list[Layer] = []
    for layer in selection.layers:
        module = layer.module
        if isinstance(module, torch.jit.ScriptModule):
            raise InjectionError(
                f"{layer.name!r} is a ScriptModule, which can't carry Python hooks.\n"
                "  train it unscripted, and script it inside `with hookdrop.without_hooks(model):`."
            )
        # The projection inside MultiheadAttention is a module for its weights' sake only.
        has_no_forward = isinstance(module, NonDynamicallyQuantizableLinear) or (
            type(module).forward is nn.Module.forward and "forward" not in vars(module)
        )
        (others if has_no_forward else called).append(layer)
    if not others:
        return called, []
    for layer in others:
        if layer.name in selection.exact:
            raise LayerError(
                f"{layer.name!r} is a {type(layer.module).__name__}, which is never called: a hook on it never fires.\n"
                "  its owner iterates over it or uses its weights: hook what is inside of it, or its owner."
            )
    names = some([layer.name for layer in others])
    if not called:
        raise LayerError(
            f"`layers` matches only modules that are never called: {names}.\n"
            "  their owners iterate over them or use their weights: hook what is inside of them, or the owners."
        )
    return called, [f"skipped {counted(len(others), 'module')} that the model never calls (containers): {names}."]


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


def factors(layers: list[Layer], p_scale: PScale) -> list[float]:
    """The factor of each layer's rate, in their order: by depth, by pattern or by a function."""
    count = len(layers)
    if p_scale == "depth":
        return [(index + 1) / count for index in range(count)]
    if p_scale == "depth_from_zero":
        if count == 1:
            raise ValueError("p_scale='depth_from_zero' gives its one site the factor 0; use 'depth' or leave it out.")
        return [index / (count - 1) for index in range(count)]
    if isinstance(p_scale, Mapping):
        return _factors_by_pattern(layers, p_scale)
    if callable(p_scale):
        return [p_scale(layer.name, index, count) for index, layer in enumerate(layers)]
    hint = "\n  one factor for all sites? multiply p by it." if isinstance(p_scale, int | float) else ""
    raise ValueError(
        f"p_scale must be 'depth', 'depth_from_zero', a mapping of patterns to factors or a function of "
        f"(name, index, count), got {p_scale!r}.{hint}"
    )


def _factors_by_pattern(layers: list[Layer], p_scale: Mapping[Any, float]) -> list[float]:
    found: dict[str, tuple[str, float]] = {}
    for pattern, factor in p_scale.items():
        names = [layer.name for entry in as_entries(pattern, "p_scale") for layer in matches(layers, entry)[0]]
        if not names:
            there = ", ".join([repr(layer.name) for layer in layers[:6]]) + (", ..." if len(layers) > 6 else "")
            raise LayerError(
                f"p_scale has {entry_text(pattern)}, which matches none of the {len(layers)} chosen layers.\n"
                f"  they are: {there}"
            )
        for name in names:
            if name in found:
                raise LayerError(
                    f"p_scale matches {name!r} twice, by {found[name][0]} and {entry_text(pattern)}: which factor?"
                )
            found[name] = (entry_text(pattern), factor)
    return [found[layer.name][1] if layer.name in found else 1.0 for layer in layers]


def _scale(sites: list[PlannedSite], scales: list[float]) -> None:
    for site, factor in zip(sites, scales, strict=True):
        if site.regularizer is not None and site.regularizer.rate is None:
            raise InjectionError(f"p_scale: {site.regularizer!r} has no rate that could be scaled.")
        site.p_scale = number(factor, f"p_scale of {site.name!r}", "inject")
        if site.p_scale < 0:
            raise ValueError(f"inject: p_scale of {site.name!r} must be at least 0, got {site.p_scale:g}.")


def _check_rate(site: PlannedSite, schedule: Schedule | None) -> None:
    """Raise an error for a rate that is out of range at the schedule's peak, or a schedule without a rate."""
    if site.regularizer is None:
        return
    target = site.regularizer.rate
    if target is None:
        if schedule is not None:
            raise InjectionError(
                f"the schedule has no rate to drive: {site.regularizer!r} has none of p, drop_prob, drop_rate.\n"
                "  leave out schedule=, or hook what has one."
            )
        return
    peak = 1.0 if schedule is None else schedule.peak
    rate = target * site.p_scale * (schedule(0) if peak is None and schedule is not None else peak or 0.0)
    try:
        site.regularizer.valid_rate(rate)
    except ValueError as error:
        times = f" x schedule {rate / (target * site.p_scale):g}" if math.isfinite(rate) and rate else ""
        raise ValueError(f"{error}\n  at {site.name!r}: p {target:g} x p_scale {site.p_scale:g}{times}.") from None


def _not_a_schedule(given: object) -> TypeError:
    name = getattr(given, "__name__", "fn")
    if isinstance(given, type):
        write = f"{name}(steps=N)"
    else:
        write = f"LambdaSchedule({name})" if callable(given) else "LinearSchedule(steps=N)"
    return TypeError(f"inject: schedule must be a hookdrop schedule, got {given!r}.\n  write: schedule={write}")

"""Plans: which sites an injection has, each with a regularizer and a factor for its rate, before a hook is placed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, cast

from torch import nn

from hookdrop.core import events
from hookdrop.core.arguments import number, one_of
from hookdrop.core.errors import InjectionError, LayerError
from hookdrop.core.parts import KINDS, PARTS
from hookdrop.core.recipe import Recipe
from hookdrop.core.registry import hooks_removed
from hookdrop.core.regularizer import P, Regularizer, rate_of
from hookdrop.core.schedules import Schedule, in_steps
from hookdrop.core.selection import (
    Entry,
    Layer,
    entry_text,
    glob_expression,
    hookable,
    select,
    values_by_entry,
)
from hookdrop.core.spec import InjectionSpec, PScale, check_picklable
from hookdrop.core.tables import counted, html_table, shape_text, some, text_table
from hookdrop.core.tensor_tree import TensorKey

_PLACES = ("output", "input", "scores", "parameters")
_WHERE = {"input": ", at the input", "parameters": ", at the parameters"}
HEADER = ("site", "type", "shape", "read as", "calls", "runs", "p", "regularizer")


@dataclass
class PlannedSite:
    """One layer to hook, or one rate of the dropout that the model already has."""

    name: str
    """Full name of the layer; for a dropout that the model already has, that of its rate."""
    type: str
    module: nn.Module = field(repr=False)
    regularizer: Regularizer | None
    """Shared by all sites of an entry; each hook gets a copy."""
    at: str = "output"
    """`"output"`, `"input"`, `"parameters"` or attention `"scores"` of the layer, the `"skip"` around its branch, or an
    `"attribute"` of the model's own dropout."""
    p_scale: float = 1.0
    branch: str = ""
    """For a skip: the name of the branch's first layer, relative to this layer."""
    shape: tuple[int, ...] | None = None
    """Of the tensor to regularize; like `calls`, None without `example_input`."""
    calls: int | None = None
    reading: str = ""
    """How the regularizer interprets the axes."""
    runs: str = ""
    """Which samples the layer runs on, if the regularizer keeps some of them."""
    attribute: str = ""
    """For a dropout that the model already has: the attribute with its rate."""
    constant: float | None = None
    """Its rate, where it is a number in the code, which nothing can change."""
    target: float | None = None
    """The rate before `p_scale`; None if there is none."""
    highest: float = 0.0
    """The largest drop probability that the schedule reaches; 0 if the rate is another number."""

    kind: str = field(init=False)
    """What drives it, a key of `hookdrop.core.parts.KINDS`."""

    def __post_init__(self) -> None:
        self.kind, regularizer = self.at, self.regularizer
        if regularizer is not None:
            self.target = rate_of(regularizer)
            runs_on_rows = "rows" in regularizer.needs or "layer_input" in regularizer.needs
            if runs_on_rows and self.at in ("output", "input"):
                self.kind = "rows"

    @property
    def p(self) -> float | None:
        """The target rate, including `p_scale`."""
        return self.constant if self.target is None else self.target * self.p_scale

    @property
    def text(self) -> str:
        """The regularizer, or the current rate of a dropout that the model already has."""
        if self.constant is not None:
            return f"{self.constant:g} in the code: can be sampled, not changed"
        if self.attribute:
            return f"{self.type}.{self.attribute} (now {float(attrgetter(self.attribute)(self.module)):g})"
        return "" if self.regularizer is None else repr(self.regularizer)


@dataclass(repr=False)
class Plan:
    """What `inject` would do with the same arguments; `print` shows a table."""

    model: nn.Module
    root: nn.Module
    """The model without its wrappers."""
    spec: InjectionSpec
    """The arguments of `inject`."""
    schedule: Schedule | None
    """In optimizer steps."""
    name: str = ""
    sites: list[PlannedSite] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    """Number of layers that each entry matched."""
    warnings: list[str] = field(default_factory=list)
    survey: Any = None
    """What running the model has shown to a recipe."""
    exact: set[str] = field(default_factory=set)
    """The layers that an entry gives by full name or as a module."""
    by_kind: dict[str, str] = field(default_factory=dict)
    """The warnings whose kind the training may find again."""
    recipe: Mapping[str, Any] | None = None
    """The arguments of `inject` with which a recipe chooses the same sites again."""

    def add(self, found: Mapping[str, str]) -> None:
        """Add warnings by their kind."""
        self.warnings += found.values()
        self.by_kind |= found

    def _table(self) -> tuple[str, list[str], list[list[Any]], list[str]]:
        """Return the title, the header, the rows and the notes."""
        places = {site.at for site in self.sites}
        where = _WHERE.get(places.pop(), "") if len(places) == 1 else ""
        requested = f"{self.spec.timing} = " if self.spec.is_relative else ""
        schedule = "" if self.schedule is None else f", {requested}{self.schedule}"
        title = f"{counted(len(self.sites), 'site')} of {type(self.root).__name__}{where}{schedule}"
        names = [(s.name or "(the model)") + (" (skip)" if s.at == "skip" else "") for s in self.sites]
        cells = [(s.type, shape_text(s.shape), s.reading, s.calls, s.runs, s.p, s.text) for s in self.sites]
        rows = [(name, *row) for name, row in zip(names, cells, strict=True)]
        # Omit empty columns: some are filled only with an example_input or a regularizer.
        used = [i for i in range(len(HEADER)) if any(row[i] not in ("", None, "?") for row in rows)]
        notes = [f"{entry}: {counted(count, 'layer')}" for entry, count in self.counts.items()]
        if self.survey is not None:
            notes.append(f"example: {self.survey.example.source}")
        notes += [f"warning: {text}" for text in self.warnings]
        return title, [HEADER[i] for i in used], [[row[i] for i in used] for row in rows], notes

    def __repr__(self) -> str:
        title, header, rows, notes = self._table()
        return "\n".join([title, text_table(header, rows), *notes])

    def _repr_html_(self) -> str:
        title, header, rows, notes = self._table()
        return html_table(header, rows, title, notes)


# --- making a plan


def make_plan(model: nn.Module, spec: InjectionSpec, total_steps: int | None = None, example_input: Any = None) -> Plan:
    """Choose the sites, and check them; nothing is placed."""
    schedule = None
    if spec.timing is not None:
        schedule = in_steps(spec.timing, total_steps)
        check_picklable(schedule, "the schedule")
    plan, given = Plan(model, model, spec, schedule), example_input is not None
    if not given and not isinstance(spec.source, Recipe):
        unmatched = _select_layers(plan, None)
    else:
        lazy = PARTS["survey"](model, example_input)
        with hooks_removed(model):  # an injection is no part of the model that a survey runs
            is_recipe = isinstance(spec.source, Recipe)
            unmatched = PARTS["run_recipe"](plan, lazy, given) if is_recipe else _select_layers(plan, lazy)
    for entry in unmatched:  # `exclude="layer4"` names one module, not its submodules
        names = [site.name for site in plan.sites]
        inside = isinstance(entry, str) and any(map(glob_expression(f"{entry}.**").fullmatch, names))
        hint = f"'{entry}.**' would exclude what is inside" if inside else f"these are {some(names)}"
        fact = "matches none of the selected layers, so it does nothing"
        plan.warnings.append(f"exclude {entry_text(entry)} {fact}: {hint}.")
    changed = [site for site in plan.sites if site.constant is None]
    for site in changed or plan.sites:
        _check_rate(site, schedule)
    hooked = [site.regularizer.title.lower() for site in plan.sites if site.regularizer is not None]
    for warn_about in events.planned:
        warn_about(plan)
    if given and not any(site.attribute for site in plan.sites):
        PARTS["inspect"](plan, example_input)
    plan.name = spec.name or plan.name or "_".join(dict.fromkeys(hooked))
    return plan


# --- layers that the user chooses


def _select_layers(plan: Plan, survey: Any) -> list[Entry]:
    """Fill in the sites, and return the entries of `exclude` that match none of the selected layers."""
    regularizers, layers = plan.spec.chosen
    source = "a key of the mapping" if isinstance(plan.spec.source, Mapping) else "`layers`"
    selection = select(plan.model, layers, plan.spec.exclude, source)
    plan.root, plan.counts, plan.exact = selection.root, selection.counts, selection.exact
    selected, skipped = hookable(selection)
    if skipped:
        modules, names = counted(len(skipped), "module"), some([layer.name for layer in skipped])
        plan.warnings.append(f"skipped {modules} that the model never calls (containers): {names}.")
    for layer in selected:
        indices = selection.matched_by[layer.name]
        if len(regularizers) > 1 and len(indices) > 1:
            keys = " and ".join([entry_text(selection.entries[i]) for i in indices])
            raise LayerError(
                f"{layer.name!r} matches more than one key of the mapping: {keys}.\n  give each layer one regularizer."
            )
        chosen = regularizers[indices[0] if len(regularizers) > 1 else 0]
        plan.sites.append(planned_site(plan.root, layer, chosen, plan.spec.at, plan.spec.tensor, survey))
    if plan.spec.p_scale is not None:
        scale(plan.sites, rate_factors(selected, plan.spec.p_scale))
    return selection.unmatched_excludes


def planned_site(
    root: nn.Module, layer: Layer, regularizer: Regularizer, at: str, tensor: TensorKey, survey: Any, chosen: str = ""
) -> PlannedSite:
    """Return the site of one layer. Some regularizers have only one place, and read settings from the model.

    A recipe may have `chosen` another place, such as the skip around a branch.
    """
    place = regularizer.only_at or at
    if at == "input" != place:
        raise InjectionError(
            f"inject: {regularizer.title} acts on the {place} of a layer, got at='input'.\n"
            f"  remove at={', and hook the layer before' * (place == 'output')}"
        )
    if place not in _PLACES:
        one_of(place, "only_at", regularizer.title, _PLACES)
    sink = KINDS["parameters" if at == "parameters" else place]
    reading = sink.check_site(regularizer, layer.module, tensor, layer.name)
    regularizer = regularizer.for_layer(root, layer.name, place, survey)
    kind, at = type(layer.module).__name__, chosen or place
    site = PlannedSite(layer.name, kind, layer.module, regularizer, at, reading=reading)
    if survey is not None and "rows" in regularizer.needs:
        site.runs = cast(Any, regularizer).runs_on(survey, layer.name, tensor)
    return site


# --- rates


def rate_factors(layers: list[Layer], p_scale: PScale) -> list[float]:
    """Return the rate factor of each layer: by depth, by pattern, or from a function."""
    found = [
        number(one, f"p_scale of {layer.name!r}", "inject")
        for layer, one in zip(layers, _factors(layers, p_scale), strict=True)
    ]
    if negative := [(layer.name, one) for layer, one in zip(layers, found, strict=True) if one < 0]:
        name, one = negative[0]
        raise ValueError(f"inject: p_scale of {name!r} must be at least 0, got {one:g}.")
    return found


def _factors(layers: list[Layer], p_scale: PScale) -> list[Any]:
    if isinstance(p_scale, Mapping):
        found = values_by_entry(layers, p_scale, "p_scale", "selected layers")
        return [found.get(layer.name, 1.0) for layer in layers]
    count = len(layers)
    if p_scale == "depth_from_zero" and count == 1:
        raise ValueError("p_scale='depth_from_zero' gives the only site the factor 0; use 'depth' or omit p_scale.")
    by_depth: dict[str, Callable[[str, int, int], float]] = {
        "equal": lambda name, index, count: 1.0,
        "depth": lambda name, index, count: (index + 1) / count,
        "depth_from_zero": lambda name, index, count: index / (count - 1),
        "depth_reversed": lambda name, index, count: (count - index) / count,
    }
    factor = by_depth[p_scale] if isinstance(p_scale, str) else p_scale
    return [factor(layer.name, index, count) for index, layer in enumerate(layers)]


def scale(sites: list[PlannedSite], scales: list[float]) -> None:
    for site, factor in zip(sites, scales, strict=True):
        if site.constant is not None:
            continue
        if site.regularizer is not None and rate_of(site.regularizer) is None:
            raise InjectionError(f"p_scale: {site.regularizer!r} has no rate to scale.")
        site.p_scale = factor


def _check_rate(site: PlannedSite, schedule: Schedule | None) -> None:
    """Raise if the rate at the schedule's peak is out of range, or if the schedule has no rate to drive."""
    target, declared = site.target, P if site.regularizer is None else type(site.regularizer).rate
    if target is None or declared is None:
        if schedule is None:
            return
        raise InjectionError(
            f"the schedule has no rate to drive: {site.text or 'the model'} has none of p, drop_prob, drop_rate.\n"
            "  omit schedule=, or use a regularizer with a rate."
        )
    peak = 1.0 if schedule is None else schedule(0) if schedule.peak is None else schedule.peak
    rate = target * site.p_scale * peak
    site.highest = rate if declared.kind == "drop" else 0.0
    try:
        declared.valid(rate, site.type if site.regularizer is None else site.regularizer.title)
    except ValueError as error:
        times = f" x schedule {rate / (target * site.p_scale):g}" if math.isfinite(rate) and rate else ""
        raise ValueError(f"{error}\n  at {site.name!r}: p {target:g} x p_scale {site.p_scale:g}{times}.") from None

"""Plans show what an injection will do before any hook is placed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from torch import nn

from hookdrop.guards.plan import plan_warnings
from hookdrop.hooks.registry import hooks_removed
from hookdrop.injection.spec import InjectionSpec
from hookdrop.regularizers import Regularizer, at_rate, rate_of
from hookdrop.schedules import Schedule
from hookdrop.utils.errors import LayerError, ShapeError
from hookdrop.utils.select import no_hooks, overrides_call
from hookdrop.utils.tables import counted, html_table, shape_text, text_table

if TYPE_CHECKING:
    from hookdrop.survey.facts import Survey
    from hookdrop.survey.layers import LayerCalls

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
    """`"output"`, `"input"`, `"parameters"` or attention `"scores"` of the layer, or the `"skip"` around its branch."""
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

    def __post_init__(self) -> None:
        if self.regularizer is not None:
            self.target = rate_of(self.regularizer)

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
    survey: Survey | None = None
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


def inspect_forward(plan: Plan, example: Any) -> None:
    """Run one forward on `example`, and fill in the shapes and calls of the sites, and the warnings.

    Raises:
        ShapeError: the regularizer does not support the tensor at a site.
        LayerError: a layer given by its full name is never called.
    """
    from hookdrop.survey.facts import survey  # only an example needs it

    with hooks_removed(plan.model):
        found = survey(plan.model, example)
    convs = (op.inputs for op in found.trace.ops if op.name in ("conv1d", "conv2d", "conv3d"))
    is_batched = all(len(x.shape) == len(weight.shape) for x, weight, *_ in convs)
    seen = [_calls(plan, found, site) for site in plan.sites]
    shape_warnings: dict[str, list[str]] = {}
    for site, observed in zip(plan.sites, seen, strict=True):
        _inspect_site(site, observed, shape_warnings, is_batched)
        _check_samples(plan, site, found)
        if site.calls == 0 and site.name in plan.exact:
            if overrides_call(site.module):
                raise LayerError(f"{site.name or 'the model'}: {no_hooks(site.module)}")
            raise LayerError(
                f"{site.name!r} ({site.type}) is not called in the forward pass: a hook on it never fires.\n"
                "  it is unused, or only its submodules or weights are used: hook its submodules, or the next layer."
            )
    for kind, texts in shape_warnings.items():
        more = f" (and {counted(len(texts) - 1, 'more site')} like it)" if len(texts) > 1 else ""
        fact, line_break, remedy = texts[0].partition("\n")
        plan.add({kind: fact + more + line_break + remedy})
    plan.add(plan_warnings(plan, seen))


def _check_samples(plan: Plan, site: PlannedSite, found: Survey) -> None:
    """Raise if a regularizer takes each row of axis 0 for a sample, and the example has its samples elsewhere."""
    regularizer, at = site.regularizer, "output" if site.at == "output" else "input"
    assert regularizer is not None
    by_row = regularizer.axes.startswith("N ") and getattr(regularizer, "time_dim", 1) != 0
    if not by_row or regularizer.samples is not None or not site.calls:
        return
    with hooks_removed(plan.model):
        samples = None if found.batch_axis == 0 else found.samples(site.name, at)
    if isinstance(samples, str) or (samples is not None and samples.argument is not None):
        raise LayerError(
            f"{regularizer.title} at {site.name!r} takes each row of axis 0 for a sample, which is wrong: {samples}.\n"
            "  use a regularizer that needs no samples: Dropout(p=...)   if axis 0 is right: omit example_input"
        )


def _calls(plan: Plan, found: Survey, site: PlannedSite) -> LayerCalls:
    if site.at != "parameters":
        return found.calls(site.name, site.at, plan.spec.tensor)
    from hookdrop.hooks.parameter_hooks import select_parameters

    chosen = select_parameters(site.module, plan.spec.tensor, site.name)
    own = {f"{site.name}.{name}".lstrip(".") for name in chosen if site.name in found.layers}
    plan.warnings += [
        f"{user} uses {name!r} outside of the calls of its layer, where it stays as it is.\n"
        "  call the layer there, or hook what comes out of that use: at='output'"
        for name, user in found.trace.elsewhere.items()
        if name in own
    ]
    shapes = [tuple(getattr(site.module, name).shape) for name in chosen]
    seen = replace(found.calls(site.name), shapes=shapes, mismatch="", tensor_count=0)
    return replace(seen, resembles_input=False, predicts="")


def _inspect_site(site: PlannedSite, seen: LayerCalls, shape_warnings: dict[str, list[str]], is_batched: bool) -> None:
    site.calls, site.shape, regularizer = seen.calls, seen.shape, site.regularizer
    assert regularizer is not None  # a rate of the model itself has no shape
    where = f"{regularizer.title} at {site.name!r}"
    try:
        if seen.mismatch:
            raise ShapeError(seen.mismatch)
        for shape in seen.shapes:
            regularizer.check(shape)
    except ShapeError as error:
        more = "" if is_batched else "\n  the example has no batch axis: pass x[None]"
        raise ShapeError(f"{where} {error}{more}") from None
    if seen.shape is None:
        return
    several = f" (1 of {seen.tensor_count} tensors)" if seen.tensor_count else ""
    at_target = regularizer if site.p_scale == 1.0 else at_rate(regularizer, site.p)
    site.reading = site.reading or at_target.reading(seen.shape) + several
    for shape in seen.shapes:
        for warning in at_target.shape_warnings(shape):
            shape_warnings.setdefault(re.sub(r"\d+", "#", warning), []).append(f"{where}: {warning}")

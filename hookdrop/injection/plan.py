"""Plans show what an injection will do before any hook is placed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from hookdrop.guards.plan import plan_warnings
from hookdrop.injection.resolve import PlannedSite, Resolved
from hookdrop.schedules import Schedule
from hookdrop.utils.tables import counted, html_table, shape_text, text_table
from hookdrop.utils.tensor_tree import TensorKey

if TYPE_CHECKING:
    from hookdrop.survey.facts import Survey

HEADER = ("site", "type", "shape", "read as", "calls", "p", "regularizer")


def make_plan(
    model: nn.Module,
    resolved: Resolved,
    *,
    tensor: TensorKey,
    name: str | None,
    on_existing: str,
    portable: bool,
    example_input: Any,
) -> Plan:
    """Make the plan of the resolved sites; the arguments are those of `inject`."""
    sites = resolved.sites
    regularizers = [site.regularizer for site in sites if site.regularizer is not None]
    warnings = resolved.warnings + (plan_warnings(resolved.root, sites) if regularizers else [])
    warned_kinds: set[str] = set()
    if example_input is not None and not any(site.attribute for site in sites):
        from hookdrop.injection.inspect import inspect_forward  # only an example needs it

        warned_kinds, more = inspect_forward(model, resolved, tensor, example_input)
        warnings += more
    if name is None:
        name = resolved.name or "_".join(dict.fromkeys([regularizer.title.lower() for regularizer in regularizers]))
    survey = None if resolved.survey is None else resolved.survey.found
    return Plan(
        model,
        resolved.root,
        name,
        sites,
        resolved.counts,
        warnings,
        resolved.schedule,
        resolved.requested_schedule,
        survey,
        tensor=tensor,
        on_existing=on_existing,
        portable=portable,
        warned_kinds=warned_kinds,
        recipe=resolved.recipe,
    )


@dataclass
class Plan:
    """What `inject` would do with the same arguments; `print` shows a table."""

    model: nn.Module = field(repr=False)
    root: nn.Module = field(repr=False)
    """The model without its wrappers."""
    name: str
    sites: list[PlannedSite]
    counts: dict[str, int]
    """Number of layers that each entry matched."""
    warnings: list[str]
    schedule: Schedule | None = None
    """In optimizer steps."""
    requested_schedule: Schedule | None = None
    """As requested, possibly in fractions of the training."""
    survey: Survey | None = field(default=None, repr=False)
    """What running the model has shown to a recipe."""
    tensor: TensorKey = None
    on_existing: str = "error"
    portable: bool = False
    warned_kinds: set[str] = field(default_factory=set, repr=False)
    """The kinds of shape warnings that `warnings` contains."""
    recipe: Mapping[str, Any] | None = field(default=None, repr=False)
    """The arguments of `inject` that a spec of a recipe repeats."""

    @property
    def at(self) -> str:
        """`"output"`, `"input"` or `"skip"`, or `"mixed"` if the sites differ."""
        all_at = {site.at for site in self.sites}
        return all_at.pop() if len(all_at) == 1 else "mixed"

    @property
    def rows(self) -> list[tuple[Any, ...]]:
        """The rows of the table, with the columns of `HEADER`."""
        rows = []
        for s in self.sites:
            name = (s.label or "(the model)") + (" (skip)" if s.at == "skip" else "")
            rows.append((name, s.type, shape_text(s.shape), s.reading, s.calls, s.p, s.text))
        return rows

    @property
    def title(self) -> str:
        """The number of sites, the model, and the schedule."""
        where = ", at the input" if self.at == "input" else ""
        schedule = "" if self.schedule is None else f", {self.schedule}"
        if self.requested_schedule is not None and self.requested_schedule.is_relative:
            schedule = f", {self.requested_schedule} = {self.schedule}"
        return f"{counted(len(self.sites), 'site')} of {type(self.root).__name__}{where}{schedule}"

    def __str__(self) -> str:
        rows = self.rows
        # Omit empty columns: some are filled only with an example_input or a regularizer.
        used = [i for i in range(len(HEADER)) if any(row[i] not in ("", None, "?") for row in rows)]
        table = text_table([HEADER[i] for i in used], [[row[i] for i in used] for row in rows])
        notes = [f"{entry}: {counted(count, 'layer')}" for entry, count in self.counts.items()]
        if self.survey is not None:
            notes.append(f"example: {self.survey.example.source}")
        return "\n".join([self.title, table, *notes, *(f"warning: {text}" for text in self.warnings)])

    def _repr_html_(self) -> str:
        return html_table(HEADER, self.rows, "\n".join([self.title, *self.warnings]))

"""The public functions `inject`, `plan` and `without_hooks`, and how a plan is placed."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from hookdrop.core import compiling, events
from hookdrop.core.arguments import named_arguments
from hookdrop.core.errors import InjectionError, nothing_placed, warn
from hookdrop.core.handle import Injection, find
from hookdrop.core.parts import KINDS
from hookdrop.core.plan import Plan, make_plan
from hookdrop.core.recipe import Recipe
from hookdrop.core.registry import hidden_modules, hooks_removed, shared_finders, sinks_of
from hookdrop.core.regularizer import Regularizer
from hookdrop.core.schedules import ConstantSchedule, Schedule
from hookdrop.core.selection import Entries
from hookdrop.core.sink import RateSink
from hookdrop.core.spec import InjectionSpec, PScale, Regularizers, check_recipe_arguments
from hookdrop.core.state import InjectionState
from hookdrop.core.tables import counted
from hookdrop.core.tensor_tree import TensorKey

_CONSTANT = ConstantSchedule()


@nothing_placed()
@named_arguments
def inject(
    model: nn.Module,
    regularizer: Regularizers | InjectionSpec,
    *,
    layers: Entries | None = None,
    exclude: Entries | None = (),
    at: str = "output",
    tensor: TensorKey = None,
    schedule: Schedule | str | None = None,
    total_steps: int | None = None,
    p_scale: PScale | None = None,
    name: str | None = None,
    on_existing: str = "error",
    portable: bool = False,
    example_input: Any = None,
) -> Injection:
    """Add a regularizer to layers of a model, without changing the model's code.

    The model's class, modules, parameters, `state_dict`, and eval output do not change.

    Args:
        model: any `nn.Module`, wrapped (DDP, torch.compile, ...) or not.
        regularizer: a hookdrop regularizer, a module without parameters that maps a tensor to a tensor, a picklable
            function, a string for `parse`, or a mapping from `layers` entries to these. Each site gets a copy. A recipe
            of `hookdrop.recipes`, such as `stochastic_depth(p=0.2)`, chooses its layers itself; `layers`, `at` and
            `tensor` then keep their defaults. An `InjectionSpec` has all arguments but `total_steps` and
            `example_input`.
        layers: the layers to hook: a full name, a glob (`*` matches within a segment, `**` across segments), a
            compiled regular expression, a module class, a module, a function of (name, module), or a list of these.
        exclude: layers to skip; takes the same entries as `layers`.
        at: `"output"` or `"input"` of the layers, or their `"parameters"`, which each call regularizes anew.
        tensor: which tensor of a tuple, list, dict, or dataclass: an index, a key, `"all"`, or None for the first
            floating-point tensor that is not 0-d. Of parameters: a name or a pattern such as `"weight_hh_*"`, or None
            for the one with two or more axes; with Mixout, for all of these.
        schedule: how the rate changes with optimizer steps, also as a string; None keeps it constant.
        total_steps: optimizer steps of the training, for a schedule with fractions of it: `LinearSchedule(steps=1.0)`.
        p_scale: a factor for the rate of each site, or of each block of a recipe: `"depth"` (l / L),
            `"depth_from_zero"` (0 to 1), `"depth_reversed"` (1 to 1 / L), `"equal"` (1), a mapping from patterns to
            factors, or a function of (name, index, count). None is 1, or the recipe's own choice.
        name: the injection's name; None uses the name of the recipe, or the regularizer's class name in lower case.
        on_existing: what to do if a site already has an injection: `"error"`, `"replace"`, or `"stack"`.
        portable: whether `torch.save(model)` and pickle leave the hooks out, so that the file loads where hookdrop is
            not installed. Copies and processes started with the model have the hooks.
        example_input: a tensor, a tuple of arguments, or a dict of keyword arguments, for one eval forward that
            checks shapes and finds layers that are never called.

    Raises:
        LayerError: an entry matches nothing, or a recipe finds no site.
        ShapeError: the regularizer would misinterpret the example's shapes.
        InjectionError: a site is taken, the model can't be hooked, the schedule has no rate to drive, or it has
            fractions and `total_steps` is missing.
        ValueError, TypeError: a setting is invalid. After any error, the model is unchanged.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
        >>> block, ramp = DropBlock(p=0.2, block_size=3), LinearSchedule(steps=10)
        >>> drop = inject(model, block, layers=nn.Conv2d, schedule=ramp)
        >>> drop.step(5)
        >>> drop
        <Injection 'dropblock': 2 sites, p=0.1 of 0.2, step 5 of LinearSchedule(steps=10)>
        >>> drop.remove()
    """
    given = (layers, exclude, at, tensor, schedule, p_scale, name, on_existing, portable)
    return place(_plan(model, regularizer, given, total_steps, example_input))


@nothing_placed()
@named_arguments
def plan(
    model: nn.Module,
    regularizer: Regularizers | InjectionSpec,
    *,
    layers: Entries | None = None,
    exclude: Entries | None = (),
    at: str = "output",
    tensor: TensorKey = None,
    schedule: Schedule | str | None = None,
    total_steps: int | None = None,
    p_scale: PScale | None = None,
    name: str | None = None,
    on_existing: str = "error",
    portable: bool = False,
    example_input: Any = None,
) -> Plan:
    """Show what `inject` would do with the same arguments, without changing the model.

    Printing the plan shows a table. `layers` shows what there is to choose from.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        >>> print(plan(model, Dropout(p=0.1), layers="*", p_scale="depth"))
        2 sites of Sequential
        site  type       p  regularizer
        ----  ------  ----  --------------
        0     Linear  0.05  Dropout(p=0.1)
        1     ReLU     0.1  Dropout(p=0.1)
        '*': 2 layers
    """
    given = (layers, exclude, at, tensor, schedule, p_scale, name, on_existing, portable)
    return _plan(model, regularizer, given, total_steps, example_input)


def _plan(model: nn.Module, regularizer: Any, given: tuple[Any, ...], total_steps: int | None, example: Any) -> Plan:
    compiling.raise_if_tracing("inject() or plan()")
    if isinstance(regularizer, InjectionSpec):
        if given != (None, (), "output", None, None, None, None, "error", False):
            raise TypeError("inject: a spec has all settings: pass only total_steps= and example_input= with it.")
        return make_plan(model, regularizer, total_steps, example)
    if isinstance(model, Regularizer | Recipe):
        raise TypeError(f"inject: the model comes first, then the regularizer; got {model!r} as the model.")
    spec = InjectionSpec(regularizer, *given)
    if isinstance(spec.source, Recipe):
        check_recipe_arguments(spec.source, spec.layers, spec.at, spec.tensor)
    return make_plan(model, spec, total_steps, example)


@contextmanager
def without_hooks(model: nn.Module) -> Iterator[nn.Module]:
    """Remove all of hookdrop's hooks inside the `with` block, for export and scripting, and restore them on exit.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        >>> _ = inject(model, Dropout(p=0.5), layers="0")
        >>> with without_hooks(model):
        ...     bool(find(model))
        False
        >>> bool(find(model))
        True
    """
    compiling.raise_if_tracing("without_hooks()")
    compiling.reset_stale_compiler()
    with hooks_removed(model):
        yield model


# --- placing a plan


def place(planned: Plan) -> Injection:
    """Place all sites, or none after an error, such as an `InjectionError` if a site or the name is taken."""
    kinds = [KINDS[site.kind] for site in planned.sites]
    conflicts, others = _find_conflicts(planned, kinds)
    # All warnings come first: where a warning is an error, nothing has changed yet.
    for text in planned.warnings:
        warn(text)
    if others:
        events.announce(events.replacing, planned.model, others)
    compiling.reset_stale_compiler()
    state = InjectionState(planned.name, tuple([s.name for s in planned.sites]), planned.schedule or _CONSTANT)
    state.portable, state.recipe = planned.spec.portable, planned.recipe
    state.live.root = weakref.ref(planned.root)
    sinks: list[RateSink] = []
    try:
        for site, kind in zip(planned.sites, kinds, strict=True):
            sinks.append(kind(site, planned, state))
        for sink, site in zip(sinks, planned.sites, strict=True):
            sink.place(site.module)
    except BaseException:
        for sink in sinks:
            sink.remove()
        raise
    if replaced := [*conflicts, *others]:
        for sink in sinks:
            sink.take_over(conflicts)
        Injection(planned.model, replaced)._detach()
    for begin in events.placed:
        begin(planned, state, sinks)
    return Injection(planned.model, sinks)


def _find_conflicts(planned: Plan, kinds: Sequence[type[RateSink]]) -> tuple[list[RateSink], list[RateSink]]:
    """Return the sinks that this injection replaces, at its sites and elsewhere in the model.

    Raises:
        InjectionError: the sites or the name are taken.
    """
    for site in planned.sites:
        if site.module in hidden_modules:
            raise InjectionError(f"inside without_hooks: {site.name!r} may have temporarily removed hooks.")
    present = list(sinks_of(planned.model))
    everything = dict.fromkeys(present)
    for find_all in shared_finders:
        everything |= dict.fromkeys(find_all())
    if not everything:
        return [], []
    wanted = {kind.place_of(site.module, site) for site, kind in zip(planned.sites, kinds, strict=True)}
    conflicts = [sink for module, sink in everything if sink.place_of(module, sink) in wanted]
    if conflicts and planned.spec.on_existing == "error":
        carry = f"{counted(len(conflicts), 'site')} already carr{'ies' if len(conflicts) == 1 else 'y'}"
        names = ", ".join(sorted({repr(sink.state.name) for sink in conflicts}))
        raise InjectionError(
            f"{carry} {names} (a re-run cell?).\n"
            '  replace them: on_existing="replace"   '
            f'keep both: on_existing="stack", name="{_free_name(planned)}"'
        )
    named = {sink.state for _, sink in present if sink.state.name == planned.name}
    if planned.spec.on_existing == "replace":
        states = named | {sink.state for sink in conflicts}
        return conflicts, [sink for _, sink in present if sink.state in states and sink not in conflicts]
    if named:
        raise InjectionError(
            f"this model already has an injection named {planned.name!r}.\n"
            f"  choose another name: inject(..., name={_free_name(planned)!r})"
        )
    for site, kind in zip(planned.sites, kinds, strict=True):
        kind.refuse_beside(site, [sink for module, sink in everything if module is site.module])
    return [], []


def _free_name(planned: Plan) -> str:
    taken = find(planned.model)
    return next(free for n in range(2, len(taken) + 3) if (free := f"{planned.name}{n}") not in taken)

"""The public functions `inject`, `plan`, `layers`, `without_hooks` and `update_bn`, and how a plan is placed."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import swa_utils

from hookdrop.guards.progress import watch
from hookdrop.hooks import compiling
from hookdrop.hooks.hook import SiteHook
from hookdrop.hooks.registry import hidden_modules, hooks_removed
from hookdrop.hooks.state import InjectionState
from hookdrop.injection import rates
from hookdrop.injection.handle import Injection, find
from hookdrop.injection.plan import Plan, PlannedSite
from hookdrop.injection.resolve import make_plan
from hookdrop.injection.sinks import (
    AttributeSink,
    DropoutSink,
    RateSink,
    dropout_sinks,
    place_of,
    sinks_of,
    take_over,
    warn_about_changed,
)
from hookdrop.injection.spec import InjectionSpec, PScale, Regularizers, check_recipe_arguments
from hookdrop.recipes.base import Recipe
from hookdrop.regularizers import Regularizer
from hookdrop.schedules import ConstantSchedule, Schedule
from hookdrop.utils.errors import HookdropError, InjectionError, nothing_placed, warn
from hookdrop.utils.names import unwrapped
from hookdrop.utils.select import Entries, named_layers, select
from hookdrop.utils.settings import named_arguments
from hookdrop.utils.tables import counted
from hookdrop.utils.tensor_tree import TensorKey

if TYPE_CHECKING:
    from hookdrop.survey.facts import Survey
    from hookdrop.survey.tree import Layers

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
    if isinstance(model, Regularizer):
        raise TypeError(f"inject: the model comes first, then the regularizer; got {model!r} as the model.")
    spec = InjectionSpec(regularizer, *given)
    if isinstance(spec.source, Recipe):
        check_recipe_arguments(spec.source, spec.layers, spec.at, spec.tensor)
    return make_plan(model, spec, total_steps, example)


@named_arguments
def layers(model: nn.Module, example_input: Any = None, *, only: Entries | None = None) -> Layers:
    """Show the layers of a model, and what fits each: what a forward of the example does there.

    Printing the result shows a tree, in which equal blocks are one row, such as `blocks.*.mlp`. Each entry of its first
    column can be copied to `inject(model, ..., layers=...)`. The model does not change.

    Args:
        model: any `nn.Module`, wrapped or not.
        example_input: a tensor, a tuple of arguments or a dict of keyword arguments. None uses the input size of timm,
            the `dummy_inputs` of transformers, or an assumed image; without any of them, only names and types are
            shown.
        only: the layers to show; takes the same entries as `layers` of `inject`. None shows all of them, and the model
            itself if something fits it, or if it is one layer.

    Returns:
        A list of one entry for each layer, with `name`, `type`, `shape`, `calls`, `fits` and `rates`.

    Raises:
        InjectionError: the model does not run on `example_input`.
        LayerError: an entry of `only` matches nothing.

    Example:
        >>> conv, linear = nn.Conv2d(3, 8, 3), nn.Linear(8 * 36, 10)
        >>> model = nn.Sequential(conv, nn.ReLU(), nn.Flatten(), linear)
        >>> layers(model, torch.zeros(2, 3, 8, 8))
        layers of Sequential, example: example_input (2, 3, 8, 8) float32
        layer  type     shape    calls  what fits
        -----  -------  -------  -----  -----------------------------------
        0      Conv2d   2x8x6x6      1  DropBlock, Dropout2d: 8 maps of 6x6
        1      ReLU     2x8x6x6      1
        2      Flatten  2x288        1
        3      Linear   2x10         1  Dropout, at="input": 288 features
    """
    from hookdrop.survey.facts import survey
    from hookdrop.survey.tree import Layers, layer_facts

    compiling.raise_if_tracing("layers()")
    known = named_layers(model) if only is None else select(model, only, source="`only`").layers
    found: Survey | None = None
    with hooks_removed(model):
        with suppress(*[InjectionError] * (example_input is None)):
            found = survey(model, example_input)
        every = layer_facts(named_layers(model), found)
    if only is None and len(every) > 1 and not every[0].fits:
        known = known[1:]
    chosen, recipes = {layer.name: layer.module for layer in known}, list[str]()
    example = "pass example_input=x for shapes, calls and what fits"
    if found is not None:
        example, recipes = f"example: {found.example.source}", _recipes_to_try(model, example_input, {*chosen.values()})
    return Layers(every, chosen, f"layers of {type(unwrapped(model)).__name__}, {example}", recipes)


_TO_TRY = (
    ("dropblock_detector(p=0.1, parts='both')", "dropblock_unet(p=0.1)", "dropblock_resnet(p=0.1, block_size=7)"),
    *(("stochastic_depth(p=0.1)",), ("layer_drop(p=0.1)",), ("head_dropout(p=0.1)",), ("drop_key(p=0.1)",)),
    *(("neftune(alpha=5)",), ("set_dropout()",)),
)
"""Recipes for `layers` to plan; of several for one purpose the first that fits, the most special first. Not
`patch_dropout`, whose plan runs the model with values."""


def _recipes_to_try(model: nn.Module, example: Any, chosen: Collection[nn.Module]) -> list[str]:
    """Return the recipes whose plan has a site among the chosen layers with a rate above 0."""
    found = []
    for texts in _TO_TRY:
        for text in texts:
            with suppress(HookdropError, ValueError):
                sites = make_plan(model, InjectionSpec(text), example_input=example).sites
                if any(site.p and site.module in chosen for site in sites):
                    found.append(text)
                    break
    return found


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


def update_bn(loader: Iterable[Any], model: nn.Module, device: int | torch.device | None = None) -> None:
    """`torch.optim.swa_utils.update_bn` with all of hookdrop's hooks on the model disabled.

    Averaged weights need fresh batch-norm statistics. One pass over the data in training mode computes them; with
    active hooks, they would be those of dropped activations. Dropout of the model itself stays active.

    Args:
        loader: yields batches: tensors, or lists and tuples whose first element is the input.
        model: the average, such as an `AveragedModel`, or any model.
        device: where to move the inputs; None does not move them.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        >>> _ = inject(model, Dropout(p=0.5), layers="0")
        >>> average = torch.optim.swa_utils.AveragedModel(model)
        >>> update_bn([torch.randn(8, 4)] * 2, average)
        >>> average.module[1].num_batches_tracked
        tensor(2)
    """
    with find(model).disabled():
        swa_utils.update_bn(loader, model, device)


# --- placing a plan


def place(planned: Plan) -> Injection:
    """Place all sites, or none after an error, such as an `InjectionError` if a site or the name is taken."""
    for site in planned.sites:
        if site.module in hidden_modules:
            raise InjectionError(f"inside without_hooks: {site.name!r} may have temporarily removed hooks.")
    conflicts, others = _replaced(planned)
    # All warnings come first: where a warning is an error, nothing has changed yet.
    for text in planned.warnings:
        warn(text)
    if others:
        warn_about_changed(others)
    compiling.reset_stale_compiler()
    state = InjectionState(planned.name, tuple([s.name for s in planned.sites]), planned.schedule or _CONSTANT)
    state.portable, state.recipe = planned.spec.portable, planned.recipe
    # The first forward must not repeat the warnings above.
    state.warned_kinds |= planned.by_kind.keys()
    state.live.planned = {kind: text for kind, text in planned.by_kind.items() if kind in ("erased", "on_output")}
    state.live.root = weakref.ref(planned.root)
    state.live.survey = planned.survey if planned.sites[0].attribute else None
    sinks: list[RateSink] = []
    try:
        for site in planned.sites:
            sinks.append(_sink(site, planned.spec.tensor, state))
        for sink, site in zip(sinks, planned.sites, strict=True):
            if isinstance(sink, SiteHook):
                sink.place(site.module)
        if isinstance(sinks[0], DropoutSink):
            rates.update_rates([state])
    except BaseException:
        for sink in sinks:
            sink.remove()
        raise
    if replaced := [*conflicts, *others]:
        take_over(sinks, conflicts)
        Injection(planned.model, replaced)._detach()
    if isinstance(sinks[0], SiteHook) or state.scheduled:
        state.live.trained = isinstance(sinks[0], DropoutSink)  # without hooks, nothing notes the calls
        watch(planned.root, state)
    return Injection(planned.model, sinks)


def _sink(site: PlannedSite, tensor: TensorKey, state: InjectionState) -> RateSink:
    if site.constant is not None:
        return DropoutSink(site.name, site.module, site.attribute, site.constant, state)
    if site.regularizer is None:
        assert site.target is not None
        return AttributeSink(site.name, site.module, site.attribute, site.target, site.p_scale, state)
    # `resolve` checked that it can be pickled, and a deep copy takes ten times as long.
    settings = site.name, pickle.loads(pickle.dumps(site.regularizer)), site.p_scale, tensor, state
    # Only these sites need what is imported here.
    if site.at == "skip":
        from hookdrop.hooks.skip_hook import SkipHook

        return SkipHook(*settings, site.branch)
    if not {"rows", "layer_input"}.isdisjoint(site.regularizer.needs):
        from hookdrop.hooks.rows_hook import RowsHook

        return RowsHook(*settings, "input")
    if site.at == "scores":
        from hookdrop.hooks.score_hooks import ScoreHook

        return ScoreHook(*settings)
    if site.at == "parameters":
        from hookdrop.hooks.parameter_hooks import ParameterHook

        return ParameterHook(*settings)
    return SiteHook(*settings, site.at)


def _replaced(planned: Plan) -> tuple[list[RateSink], list[RateSink]]:
    """Return the sinks that this injection replaces, at its sites and elsewhere in the model.

    Raises:
        InjectionError: the sites or the name are taken.
    """
    present = list(sinks_of(planned.model))
    # A rate may belong to an object that layers outside this model share.
    elsewhere = dropout_sinks() if planned.sites[0].attribute else []
    everything = dict.fromkeys([*present, *elsewhere])
    if not everything:
        return [], []
    wanted = {place_of(site.module, site) for site in planned.sites}
    conflicts = [sink for module, sink in everything if place_of(module, sink) in wanted]
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
    skipping = {site.module for site in planned.sites if "rows" in getattr(site.regularizer, "needs", ())}
    for module, sink in everything:
        if module in skipping and isinstance(sink, SiteHook) and "rows" in sink.regularizer.needs:
            raise InjectionError(
                f"{sink.where} skips samples of this layer already, and a part of a part cannot be put back.\n"
                "  use one of them, or hook another layer"
            )
    return [], []


def _free_name(planned: Plan) -> str:
    taken = find(planned.model)
    return next(free for n in range(2, len(taken) + 3) if (free := f"{planned.name}{n}") not in taken)

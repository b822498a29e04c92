"""The public functions: `inject`, `plan`, `eject`, `without_hooks`, and `from_config`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from hookdrop.errors import LayerError, StateError, nothing_placed
from hookdrop.hooks import compiling
from hookdrop.hooks.registry import hooks_removed
from hookdrop.injection.config import Allowed, ConfiguredSite, InjectionConfig, read_config
from hookdrop.injection.group import Injections, find
from hookdrop.injection.handle import Injection
from hookdrop.injection.plan import Plan, make_plan
from hookdrop.injection.resolve import PScale, Regularizers, as_source, resolve, resolve_recipe
from hookdrop.recipes.base import Recipe
from hookdrop.regularizers import Regularizer
from hookdrop.schedules import Schedule
from hookdrop.utils.select import Entries, Layer, layers_by_name, select
from hookdrop.utils.tensor_tree import TensorKey
from hookdrop.utils.validation import one_of

__all__ = ["Injections", "eject", "find", "from_config", "inject", "plan", "without_hooks"]


def inject(
    model: nn.Module,
    regularizer: Regularizers,
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
            function, a string for `parse`, or a mapping from `layers` entries to these. Each site gets a copy.
        layers: the layers to hook: a fully qualified name, a glob (`*` matches within a segment, `**` across
            segments), a compiled regular expression, a module class, a module, a function of (name, module), or a
            list of these.
        exclude: layers to skip; takes the same entries as `layers`.
        at: `"output"` or `"input"` of the layers.
        tensor: which tensor of a tuple, list, dict, or dataclass: an index, a key, `"all"`, or None for the first
            floating-point tensor that is not 0-d.
        schedule: how the rate changes with optimizer steps, also as a string such as `"LinearSchedule(steps=1000)"`;
            None keeps it constant.
        total_steps: the length of the training in optimizer steps, for a schedule with fractions of it, such as
            `LinearSchedule(steps=1.0)`.
        p_scale: a factor for the rate of each site: `"depth"` (l / L), `"depth_from_zero"` (0 to 1), a mapping from
            patterns to factors, or a function of (name, index, count).
        name: the injection's name; None uses the regularizer's class name in lower case.
        on_existing: what to do if a site already has an injection: `"error"`, `"replace"`, or `"stack"`.
        portable: whether `torch.save(model)` and pickle leave the hooks out, so that the file loads where hookdrop is
            not installed. Copies and processes started with the model have the hooks.
        example_input: a tensor, a tuple of arguments, or a dict of keyword arguments, for one eval forward that
            checks shapes and finds layers that are never called.

    Returns:
        The handle, with `step`, `follow`, `disable`, `probe`, `remove`, ...

    Raises:
        LayerError: an entry matches nothing.
        ShapeError: the regularizer would misinterpret the example's shapes.
        InjectionError: a site is taken, the model can't be hooked, the schedule has no rate to drive, or it has
            fractions and `total_steps` is missing.
        ValueError, TypeError: a setting is invalid. After any error, the model is unchanged.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
        >>> drop = inject(model, DropBlock(p=0.2, block_size=3), layers=nn.Conv2d, schedule=LinearSchedule(steps=10))
        >>> drop.step(5)
        >>> drop
        <Injection 'dropblock': 2 sites, p=0.1 of 0.2, step 5 of LinearSchedule(steps=10)>
        >>> drop.remove()
    """
    if regularizer is None:
        raise TypeError("inject: the regularizer is None: pass one, such as DropBlock(p=0.1).")
    return plan(
        model,
        regularizer,
        layers=layers,
        exclude=exclude,
        at=at,
        tensor=tensor,
        schedule=schedule,
        total_steps=total_steps,
        p_scale=p_scale,
        name=name,
        on_existing=on_existing,
        portable=portable,
        example_input=example_input,
    ).apply()


def plan(
    model: nn.Module,
    regularizer: Regularizers | None = None,
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

    Without a regularizer, it lists layers: `print(plan(model, layers="**"))`.

    Returns:
        The plan, with `sites`, `counts`, `warnings`, and `apply()`. Printing it shows a table.

    Raises:
        The same errors as `inject`.

    Example:
        >>> print(plan(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), Dropout(p=0.1), layers="*", p_scale="depth"))
        2 sites of Sequential
        site  type       p  regularizer
        ----  ------  ----  --------------
        0     Linear  0.05  Dropout(p=0.1)
        1     ReLU     0.1  Dropout(p=0.1)
        '*': 2 layers
    """
    with nothing_placed():
        compiling.raise_if_tracing("inject() or plan()")
        if isinstance(model, Regularizer):
            raise TypeError(f"inject: the model comes first, then the regularizer; got {model!r} as the model.")
        one_of(at, "at", "inject", ("output", "input"))
        if isinstance(tensor, bool) or not isinstance(tensor, TensorKey):
            raise TypeError(f"inject: tensor must be an index, a key, 'all' or None, got {tensor!r}.")
        given = as_source(regularizer)
        if isinstance(given, Recipe):
            _check_recipe_arguments(given, layers, at, tensor)
            resolved = resolve_recipe(model, given, exclude, schedule, p_scale, total_steps, example_input)
            name = type(given).__name__ if name is None else name
        else:
            resolved = resolve(model, given, layers, exclude, schedule, p_scale, at, total_steps, example_input)
        return make_plan(
            model,
            resolved,
            tensor=tensor,
            name=name,
            on_existing=on_existing,
            portable=portable,
            example_input=example_input,
        )


def _check_recipe_arguments(recipe: Recipe, layers: Entries | None, at: str, tensor: TensorKey) -> None:
    given = {"layers": layers is not None, "at": at != "output", "tensor": tensor is not None}
    if used := [name for name, is_given in given.items() if is_given]:
        raise TypeError(
            f"the recipe {type(recipe).__name__} chooses its layers: remove {' and '.join(f'{n}=' for n in used)}.\n"
            "  to leave some out: exclude=   to choose them yourself: pass a regularizer instead of a recipe"
        )


def eject(model: nn.Module, name: str | None = None) -> int:
    """Remove every injection from a model, or only the one with this name.

    Returns:
        The number of removed hooks.

    Raises:
        InjectionError: there is no injection with this name.
    """
    found = find(model) if name is None else [find(model)[name]]
    count = sum(len(injection.sites) for injection in found)
    for injection in found:
        injection.remove()
    return count


@contextmanager
def without_hooks(model: nn.Module) -> Iterator[nn.Module]:
    """Remove all of hookdrop's hooks inside the `with` block, for export and scripting, and restore them on exit.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        >>> _ = inject(model, Dropout(p=0.5), layers="0")
        >>> with without_hooks(model):
        ...     len(find(model))
        0
        >>> len(find(model))
        1
    """
    compiling.raise_if_tracing("without_hooks()")
    compiling.reset_stale_compiler()
    with hooks_removed(model):
        yield model


def from_config(
    model: nn.Module, config: Mapping[str, Any], allow: Allowed = (), *, total_steps: int | None = None
) -> Injection:
    """Recreate the injection that `Injection.config` describes.

    Args:
        model: a model with the sites of the config.
        config: from `Injection.config`, with or without a round trip through JSON.
        allow: classes and functions from outside hookdrop that the config may name. Nothing is imported.
        total_steps: as in `inject`, for a config written by hand with fractions in its schedule.

    Raises:
        StateError: the config is invalid or names a class that is not allowed; the message has the path and value.
        LayerError: the model lacks a site.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        >>> config = inject(model, Dropout(p=0.5), layers="0").config
        >>> from_config(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), config).sites[0].name
        '0'
    """
    with nothing_placed():
        layers = layers_by_name(model)
        return _plan_from_config(model, layers, read_config(config, allow), total_steps).apply()


def _plan_from_config(
    model: nn.Module, layers: Mapping[str, Layer], config: InjectionConfig, total_steps: int | None
) -> Plan:
    sites: dict[nn.Module, ConfiguredSite] = {}
    for site in config.sites:
        if site.name not in layers:
            select(model, site.name)  # its error lists the nearest names
            raise LayerError(f"the config's site {site.name!r} is a pattern, not the full name of a layer.")
        module = layers[site.name].module
        if module in sites:
            raise StateError(f"the config has two sites on one layer: {sites[module].name!r} and {site.name!r}.")
        if site.branch and site.branch not in dict(module.named_modules()):
            raise LayerError(f"the config's site {site.name!r} has no layer {site.branch!r} to use as its branch.")
        sites[module] = site
    try:
        scales = None if all(s.p_scale == 1.0 for s in config.sites) else {m: s.p_scale for m, s in sites.items()}
        regularizers = {module: site.regularizer for module, site in sites.items()}
        resolved = resolve(model, regularizers, None, (), config.schedule, scales, total_steps=total_steps)
        for planned in resolved.sites:
            planned.at, planned.branch = sites[planned.module].at, sites[planned.module].branch
        return make_plan(model, resolved, tensor=config.tensor, name=config.name, portable=config.portable)
    except LayerError:
        raise
    except Exception as error:
        raise StateError(f"the config is invalid for this model: {error}") from error

"""Select layers by name, glob, regular expression, class, instance, or predicate.

Wrappers (DistributedDataParallel, torch.compile, ...) are recognized by their type: the wrapped module keeps the name
that it has without them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from hookdrop.core.errors import InjectionError, LayerError, nearest
from hookdrop.core.tables import counted, some
from hookdrop.core.torch_internals import children_of

# --- names


@lru_cache(maxsize=1024)
def glob_expression(pattern: str) -> re.Pattern[str]:
    """Compile a glob over dotted names into a regular expression.

    `*`, `?`, `[12]` and `[!a]` match within one segment. `**.` at the start or in the middle matches zero or more
    segments; `.**` at the end and `**` alone match one or more.

    Example:
        >>> bool(glob_expression("**.bn[12]").fullmatch("layer1.0.bn2"))
        True
    """
    *before, last = pattern.split(".")
    parts = [r"(?:[^.]+\.)*" if segment == "**" else _segment_expression(segment) + r"\." for segment in before]
    try:
        return re.compile("".join(parts) + (r"[^.]+(?:\.[^.]+)*" if last == "**" else _segment_expression(last)))
    except re.error as error:
        raise LayerError(f"cannot parse the glob {pattern!r}: {error}.") from None


def _segment_expression(segment: str) -> str:
    def translated(token: re.Match[str]) -> str:
        negated, inside = token.groups()
        if inside is None:
            return {"*": "[^.]*", "?": "[^.]"}.get(token[0]) or re.escape(token[0])
        escaped = re.sub(r"([\\\[\]^&~|])", r"\\\1", inside)
        return f"(?![.])[{'^' if negated else ''}{escaped}]"

    return re.sub(r"(?s)\[(!|(?!!))(.[^]]*)\]|.", translated, segment)


def check_model(model: object) -> None:
    """Raise `TypeError` if `model` is not a module."""
    if not isinstance(model, nn.Module):
        hint = "\n  for several models: for model in models: inject(model, ...)" * isinstance(
            model, list | tuple | dict
        )
        raise TypeError(f"the model must be a torch.nn.Module, got {type(model).__name__}.{hint}")


# --- wrappers

# The attribute that holds the wrapped module, by the wrapper's class. None of these is imported: if a module was not
# loaded, no instances of its classes exist.
_WRAPPERS = {
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": "_fsdp_wrapped_module",
    "torch.optim.swa_utils.AveragedModel": "module",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointWrapper": "_checkpoint_wrapped_module",
    "timm.utils.model_ema.ModelEmaV2": "module",
    "timm.utils.model_ema.ModelEmaV3": "module",
    "timm.task.task.TrainingTask": "trainable_module",
    "lightning.fabric.wrappers._FabricModule": "_original_module",
    "deepspeed.runtime.engine.DeepSpeedEngine": "module",
    "ema_pytorch.ema_pytorch.EMA": "ema_model",
    "opacus.grad_sample.gsm_base.AbstractGradSampleModule": "_module",
    "peft.peft_model.PeftModel": "base_model",
    "peft.tuners.tuners_utils.BaseTuner": "model",
}

WRAPPER_ATTRIBUTES = set(_WRAPPERS.values())  # the attributes that hold a wrapped module


def _wrapped_attribute(cls: type) -> str | None:
    for name, attribute in _WRAPPERS.items():
        module, _, class_name = name.rpartition(".")
        wrapper = getattr(sys.modules.get(module), class_name, None)
        if wrapper is not None and issubclass(cls, wrapper):
            return attribute
    return None


wrapped_attribute: Callable[[type], str | None] = lru_cache(maxsize=1024)(_wrapped_attribute)


def unwrapped(module: nn.Module) -> nn.Module:
    inner: object = module
    while isinstance(inner, nn.Module):
        module = inner
        attribute = wrapped_attribute(type(module))
        inner = getattr(module, attribute, None) if attribute else None
    return module


def module_at(model: nn.Module, name: str) -> nn.Module | None:
    """Return the module of this name, which may be a wrapper; None if a wrapper hides it, or there is none."""
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


# --- layers


Predicate: TypeAlias = Callable[[str, nn.Module], bool]
Entry: TypeAlias = str | re.Pattern[str] | type[nn.Module] | nn.Module | Predicate
Entries: TypeAlias = Entry | Iterable[Entry]
Value = TypeVar("Value")
_SEE_ALL = "  see all:      print(hookdrop.layers(model))"


@dataclass
class Layer:
    """One module of a model, with all of its names."""

    name: str  # the first fully qualified name, without wrappers; `""` is the model itself
    module: nn.Module
    aliases: set[str] = field(default_factory=set)  # all names without wrappers; a shared module has several
    wrapped_names: set[str] = field(default_factory=set)  # names that contain wrapper segments
    wrappers: dict[nn.Module, None] = field(default_factory=dict)  # the wrappers around the module, as an ordered set


@dataclass
class Selection:
    """The selected layers in `named_modules()` order, and what each entry matched."""

    root: nn.Module  # the model without its wrappers
    entries: list[Entry]
    layers: list[Layer]
    counts: dict[str, int]  # for each entry, the number of matched layers that have a forward
    matched_by: dict[str, list[int]]  # for each layer name, the indices of the entries that matched it
    exact: set[str]  # names of layers that an entry gives by full name or as a module
    unmatched_excludes: list[Entry]  # the entries of `exclude` that match none of the selected layers


def named_layers(model: nn.Module) -> list[Layer]:
    """Return every module of `model`, the model itself first."""
    if isinstance(model, torch.jit.ScriptModule):
        raise InjectionError(
            "a ScriptModule does not support Python hooks: train the module unscripted, and script it inside "
            "`with hookdrop.without_hooks(model):`."
        )
    check_model(model)
    layers: dict[int, Layer] = {}
    # Depth first: the name and those with wrapper segments, module, ids of the modules around it, wrappers around it.
    stack: list[tuple[tuple[str, ...], nn.Module, tuple[int, ...], tuple[nn.Module, ...]]] = [(("",), model, (), ())]
    while stack:
        names, module, ancestors, wrappers = stack.pop()
        if id(module) in ancestors:
            continue
        ancestors = (*ancestors, id(module))
        attribute = wrapped_attribute(type(module))
        inner = getattr(module, attribute, None) if attribute else None
        if attribute and isinstance(inner, nn.Module):
            stack.append((names + _below(names, attribute), inner, ancestors, (*wrappers, module)))
            continue
        layer = layers.setdefault(id(module), Layer(names[0], module))
        layer.aliases.add(names[0])
        layer.wrapped_names.update(names[1:])
        layer.wrappers.update(dict.fromkeys(wrappers))
        for child_name, child in reversed(children_of(module).items()):
            if child is not None:
                stack.append((_below(names, child_name), child, ancestors, wrappers))
    return list(layers.values())


def _below(names: tuple[str, ...], child: str) -> tuple[str, ...]:
    return tuple([f"{name}.{child}" if name else child for name in names])


def layers_by_name(model: nn.Module) -> dict[str, Layer]:
    """Map every full name to its layer; names without wrappers take precedence."""
    layers = named_layers(model)
    wrapped = {name: layer for layer in layers for name in layer.wrapped_names}
    return wrapped | {name: layer for layer in layers for name in layer.aliases}


def select(model: nn.Module, layers: Entries, exclude: Entries | None = (), source: str = "`layers`") -> Selection:
    """Select the layers that match `layers` and do not match `exclude`. Errors call `layers` `source`."""
    everything = named_layers(model)
    included = as_entries(layers, source)
    if not included:
        raise LayerError("`layers` is empty: nothing would be regularized.\n" + _SEE_ALL)
    matched_by: dict[str, list[int]] = {}
    exact, counts = set[str](), dict[str, int]()
    for index, entry in enumerate(included):
        found, is_exact = _match_or_raise(everything, entry, source)
        # Report a module by its name, since other modules may have its class.
        text = repr(found[0].name) if isinstance(entry, nn.Module) else entry_text(entry)
        counts[text] = sum([has_forward(layer.module) for layer in found])
        for layer in found:
            matched_by.setdefault(layer.name, []).append(index)
        if is_exact:
            exact.update([layer.name for layer in found])
    removed, excluded, unmatched = excluded_names(everything, exclude, matched_by)
    selected = [layer for layer in everything if layer.name in matched_by and layer.name not in removed]
    if not selected:
        raise LayerError(
            f"`exclude` removes every layer that `layers` matches ({len(matched_by)}): nothing is left.\n"
            f"  layers:  {', '.join(map(entry_text, included))}\n  exclude: {', '.join(map(entry_text, excluded))}"
        )
    return Selection(everything[0].module, included, selected, counts, matched_by, exact, unmatched)


def hookable(selection: Selection) -> tuple[list[Layer], list[Layer]]:
    """Return the selected layers that the model can call, and the others, such as containers without a forward.

    Raises:
        LayerError: the model calls none of them, or not one that is named exactly.
        InjectionError: a layer does not support Python hooks, or has no eval mode.
    """
    called, skipped = list[Layer](), list[Layer]()
    for layer in selection.layers:
        kind = type(layer.module)
        if isinstance(layer.module, torch.jit.ScriptModule):
            raise InjectionError(
                f"{layer.name!r} is a ScriptModule, which does not support Python hooks.\n"
                "  train it unscripted, and script it inside `with hookdrop.without_hooks(model):`."
            )
        if "'keras." in str(kind.__mro__):
            raise InjectionError(
                f"{layer.name!r} ({kind.__name__}) is a Keras layer.\n"
                "  Keras never puts its layers in eval mode: a hook would drop in predict() and evaluate() too.\n"
                "  use a layer such as keras.layers.Dropout, or hook modules inside a keras.layers.TorchModuleWrapper."
            )
        (called if has_forward(layer.module) else skipped).append(layer)
    for layer in skipped:
        if layer.name in selection.exact or not called:
            raise LayerError(
                f"{layer.name!r} is a {type(layer.module).__name__}, which is never called: a hook on it never fires.\n"
                "  its parent only iterates over it or uses its weights: hook the layers inside, or the parent."
            )
    return called, skipped


def excluded_names(
    everything: list[Layer], exclude: Entries | None, selected: Collection[str]
) -> tuple[set[str], list[Entry], list[Entry]]:
    """Return the names that `exclude` matches, its entries, and those that match none of `selected`."""
    entries = as_entries(() if exclude is None else exclude, "`exclude`")
    found = [{layer.name for layer in _match_or_raise(everything, entry, "`exclude`")[0]} for entry in entries]
    unmatched = [entry for entry, names in zip(entries, found, strict=True) if names.isdisjoint(selected)]
    return set[str]().union(*found), entries, unmatched


def values_by_entry(layers: Sequence[Layer], given: Mapping[Any, Value], source: str, what: str) -> dict[str, Value]:
    """Return the values of a mapping from entries, by the names of the layers that match. Errors call them `what`."""
    found: dict[str, tuple[Entry, Value]] = {}
    names = [layer.name for layer in layers]
    for key, value in given.items():
        matching = [layer.name for entry in as_entries([key], source) for layer in matches(layers, entry)[0]]
        if not matching:
            near = nearest(key, names) if isinstance(key, str) else []
            raise LayerError(
                f"{source} contains {entry_text(key)}, which matches none of the {len(names)} {what}.\n"
                f"  {'did you mean' if near else 'their names'}: {some(near or names)}"
            )
        for name in matching:
            if name in found:
                raise LayerError(f"{source} matches {name!r} twice: {entry_text(found[name][0])}, {entry_text(key)}.")
            found[name] = key, value
    return {name: value for name, (_, value) in found.items()}


def as_entries(entries: Any, source: str) -> list[Entry]:
    """Return `entries` as a list, after checking the type of each; errors call them `source`."""
    single = isinstance(entries, str | re.Pattern | type | nn.Module) or callable(entries)
    if isinstance(entries, Mapping):
        raise TypeError(f"{source} is a mapping: pass {{layers: regularizer}} as the regularizer, without `layers`.")
    listed = [entries] if single else list(entries) if isinstance(entries, Iterable) else [entries]
    if isinstance(entries, str) and not entries:
        raise LayerError(f"{source} contains an empty name; to select the model itself, pass the model.")
    for entry in listed:
        if isinstance(entry, type):
            if not issubclass(entry, nn.Module):
                raise LayerError(f"{source} contains the class {entry.__name__}, which is not a torch.nn.Module.")
        elif not isinstance(entry, str | re.Pattern) and not callable(entry):
            hint = f"\n  names are strings: write {str(entry)!r}" if isinstance(entry, int) else ""
            raise LayerError(
                f"{source} contains {entry!r} ({type(entry).__name__}).{hint}\n"
                "  use a name, a glob, a compiled regular expression, a module class, a module,\n"
                "  or a function of (name, module)."
            )
    return listed


def entry_text(entry: Entry) -> str:
    if isinstance(entry, re.Pattern):
        return f"re.compile({entry.pattern!r})"
    if isinstance(entry, str):
        return repr(entry)
    if isinstance(entry, type):
        return entry.__name__
    return f"<{type(entry).__name__}>" if isinstance(entry, nn.Module) else getattr(entry, "__name__", repr(entry))


def has_forward(module: nn.Module) -> bool:
    """Whether the model can call the module; containers such as `ModuleList` have no forward."""
    if isinstance(module, torch.jit.ScriptModule):
        return True
    # MultiheadAttention uses the weights of its output projection, and never calls the module.
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return False
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def overrides_call(module: nn.Module) -> bool:
    """Whether its class overrides `__call__`. If a forward then records no call of it, no hook on it ever runs."""
    return type(module).__call__ is not nn.Module.__call__


def no_hooks(module: nn.Module) -> str:
    """Return the fact and the advice for a module that overrides `__call__` and runs no hooks."""
    return (
        f"{type(module).__name__} overrides __call__ and calls forward() itself, so PyTorch runs no hook on it.\n"
        "  hook layers inside it that do not, such as nn.Linear, or call a regularizer in its forward: x = self.drop(x)"
    )


def unregistered(layers: Sequence[Layer]) -> str:
    """Return a line about modules that a plain list or dict holds, and that are therefore no part of the model."""
    known = {one for layer in layers for one in (layer.module, *layer.wrappers)}

    def unknown(value: Any) -> list[Any]:
        inside = value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()
        return [one for one in inside if issubclass(type(one), nn.Module) and one not in known]

    tables = [(layer.name, vars(layer.module)) for layer in layers]
    found = [
        f"{name}.{key}".lstrip(".") for name, own in tables for key in own if key != "_modules" and unknown(own[key])
    ]
    advice = "a plain list or dict, so they are no part of the model: use nn.ModuleList or nn.ModuleDict"
    return f"  {some(found)} has modules in {advice}.\n" if found else ""


def _match_or_raise(everything: list[Layer], entry: Entry, source: str) -> tuple[list[Layer], bool]:
    found, exact = matches(everything, entry)
    if not found:
        raise LayerError(_no_match_message(everything, entry, source))
    return found, exact


def matches(everything: Sequence[Layer], entry: Entry) -> tuple[list[Layer], bool]:
    """Return the layers that `entry` matches, and whether it is a full name or a module."""
    if isinstance(entry, str):
        for names in attrgetter("aliases"), attrgetter("wrapped_names"):
            if exact := [layer for layer in everything if entry in names(layer)]:
                return exact[:1], True
        return [layer for layer in everything if _glob_matches(entry, layer)], False
    if isinstance(entry, nn.Module):
        return [layer for layer in everything if layer.module is entry or entry in layer.wrappers], True
    if isinstance(entry, type):
        return [x for x in everything if any(isinstance(m, entry) for m in (x.module, *x.wrappers))], False
    accepts: Any = (lambda name, _: entry.fullmatch(name)) if isinstance(entry, re.Pattern) else entry
    inside = [layer for layer in everything if layer.name]
    # Only if no name without wrappers matches, the names that `named_modules()` of the wrapper gives.
    for names in attrgetter("aliases"), attrgetter("wrapped_names"):
        if found := [layer for layer in inside if any(accepts(name, layer.module) for name in names(layer))]:
            return found, False
    return [], False


def _glob_matches(pattern: str, layer: Layer) -> bool:
    fullmatch = glob_expression(pattern).fullmatch
    if any(map(fullmatch, layer.aliases - {""})):
        return True
    # A wrapper's segment matches only if the pattern spells it out, and never by `*`.
    literal = set(pattern.split("."))
    return any(
        fullmatch(name) and set(name.split(".")) & WRAPPER_ATTRIBUTES <= literal for name in layer.wrapped_names - {""}
    ) and bool(layer.name)


def _no_match_message(everything: list[Layer], entry: Entry, source: str) -> str:
    model, hints, lists = type(everything[0].module).__name__, "", unregistered(everything)
    if isinstance(entry, nn.Module):
        found = type(entry).__name__
        return f"{source} contains a {found} that is not part of this {model} (part of a copy?).\n{lists}{_SEE_ALL}"
    if isinstance(entry, str) and not re.search(r"[*?[]", entry):
        fact = f"names a module that {model} does not have"
    else:
        kind = "a pattern" if isinstance(entry, str) else "a class" if isinstance(entry, type) else "an entry"
        fact = f"contains {kind} that matches no module of {model}"
    if isinstance(entry, str) and (hint := _suggestion(everything, entry)):
        hints = f"  {hint}\n"
    if isinstance(entry, type):
        classes = sorted({type(layer.module).__name__ for layer in everything})
        hints = f"  available:    {', '.join(classes[:12])}{', ...' if len(classes) > 12 else ''}\n"
    return f"{source} {fact}.\n  requested:    {entry_text(entry)}\n{hints}{lists}{_SEE_ALL}"


def _suggestion(everything: list[Layer], text: str) -> str:
    names = [layer.name for layer in everything if layer.name]

    def matched(pattern: str) -> int:
        return sum(glob_expression(pattern).fullmatch(name) is not None for name in names)

    # More segments before the text, then where it has a dot or a `*`, which does not match a dot.
    gaps = [(text[: gap.start()], text[gap.end() :]) for gap in re.finditer(r"[.*]+", text)]
    longer = [f"{before}{between}{after}".strip(".") for between in (".*.", ".**.") for before, after in gaps]
    for pattern in (p for each in (text, text.rstrip(".*"), *longer) for p in (each, f"**.{each}")):
        if count := matched(pattern):
            return f"did you mean: {pattern!r} ({counted(count, 'module')})"
    if count := sum(type(layer.module).__name__ == text.rpartition(".")[2] for layer in everything):
        return f"did you mean: the class {text} itself, not its name as a string ({counted(count, 'module')})"
    if re.search(r"\\|\.\+|\(|\|", text):
        return f"a regular expression? write re.compile({text!r})"
    near = []
    segments, known = text.split("."), sorted({segment for name in names for segment in name.split(".")})
    for index, segment in enumerate(segments):  # replace one segment with a similar one
        for other in nearest(segment, known):
            candidate = ".".join([*segments[:index], other, *segments[index + 1 :]])
            near += list(filter(matched, (candidate, f"**.{candidate}")))[:1]
    near = near or nearest(text, names)
    return f"did you mean: {', '.join(map(repr, near[:3]))}" if near else ""

"""Choosing layers: names, globs, expressions, classes, instances, predicates.

A model is walked once into `Layer`s. Wrappers (DistributedDataParallel, torch.compile, ...) are looked through
by their type: what they wrap stands under the name that it has without them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn

from hookdrop.errors import InjectionError, LayerError, nearest
from hookdrop.utils.globs import glob_expression
from hookdrop.utils.tables import counted
from hookdrop.utils.torch_internals import children_of
from hookdrop.utils.wrappers import WRAPPER_ATTRIBUTES, wrapped_attribute

Predicate: TypeAlias = Callable[[str, nn.Module], bool]
Entry: TypeAlias = str | re.Pattern[str] | type[nn.Module] | nn.Module | Predicate
Entries: TypeAlias = Entry | Iterable[Entry]
_Visit: TypeAlias = tuple[str, tuple[str, ...], nn.Module, tuple[int, ...], tuple[nn.Module, ...]]
_SEE_ALL = '  see all:      print(hookdrop.plan(model, layers="**"))'


@dataclass
class Layer:
    """One module of a model under every name that it has."""

    name: str
    """The first fully qualified name, wrappers left out; `""` is the model itself."""
    module: nn.Module
    aliases: set[str] = field(default_factory=set)
    """All names without wrappers (a shared module has several)."""
    spellings: set[str] = field(default_factory=set)
    """Names with wrapper segments in them."""
    wrappers: dict[nn.Module, None] = field(default_factory=dict)
    """The wrappers around the module, as an ordered set."""


@dataclass
class Selection:
    """The chosen layers in `named_modules()` order, and what each entry matched."""

    root: nn.Module
    """The model without its wrappers."""
    entries: list[Entry]
    layers: list[Layer]
    counts: dict[str, int]
    chosen_by: dict[str, list[int]]
    """Indices of the entries that matched a layer, by its name."""
    exact: set[str]
    """Names of layers that an entry names in full, or gives as instance."""
    unmatched_excludes: list[Entry]
    """The entries of `exclude` that match none of the chosen layers."""


def walk(model: nn.Module) -> list[Layer]:
    """Every module of `model`, the model itself first."""
    if isinstance(model, torch.jit.ScriptModule):
        raise InjectionError(
            "a ScriptModule can't carry Python hooks: train the module unscripted, and script it inside "
            "`with hookdrop.without_hooks(model):`."
        )
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model must be a torch.nn.Module, got {type(model).__name__}.")
    layers: dict[int, Layer] = {}
    # Depth first: name, names with wrapper segments, module, the modules that it lies in, wrappers around it.
    todo: list[_Visit] = [("", (), model, (), ())]
    while todo:
        name, spellings, module, owners, wrappers = todo.pop()
        if id(module) in owners:
            continue
        owners = (*owners, id(module))
        attribute = wrapped_attribute(type(module))
        inner = getattr(module, attribute, None) if attribute else None
        if attribute and isinstance(inner, nn.Module):
            longer = tuple(_join(s, attribute) for s in (name, *spellings))
            todo.append((name, spellings + longer, inner, owners, (*wrappers, module)))
            continue
        layer = layers.get(id(module))
        if layer is None:
            layer = layers[id(module)] = Layer(name, module)
        layer.aliases.add(name)
        layer.spellings.update(spellings)
        layer.wrappers.update(dict.fromkeys(wrappers))
        prefix = f"{name}." if name else ""
        for child_name, child in reversed(list(children_of(module).items())):
            if child is not None:
                longer = tuple(_join(s, child_name) for s in spellings) if spellings else ()
                todo.append((prefix + child_name, longer, child, owners, wrappers))
    return list(layers.values())


def layers_by_name(model: nn.Module) -> dict[str, Layer]:
    """Every layer by each of its full names; where two are spelled the same, the one without wrappers."""
    everything = walk(model)
    spelled = {name: layer for layer in everything for name in layer.spellings}
    return spelled | {name: layer for layer in everything for name in layer.aliases}


def select(model: nn.Module, layers: Entries, exclude: Entries | None = ()) -> Selection:
    """The layers that `layers` names and `exclude` does not.

    Raises:
        LayerError: an entry matches nothing, is nothing that can match, or nothing is left.
    """
    everything = walk(model)
    wanted, unwanted = as_entries(layers, "layers"), as_entries(() if exclude is None else exclude, "exclude")
    if not wanted:
        raise LayerError("`layers` is empty: nothing would be regularized.\n" + _SEE_ALL)
    chosen_by: dict[str, list[int]] = {}
    exact: set[str] = set()
    counts: dict[str, int] = {}
    for index, entry in enumerate(wanted):
        found, is_exact = _must_match(everything, entry, "layers")
        # A module is known by its name; its class would be that of others too.
        text = repr(found[0].name) if isinstance(entry, nn.Module) else entry_text(entry)
        counts[text] = len(found)
        for layer in found:
            chosen_by.setdefault(layer.name, []).append(index)
            if is_exact:
                exact.add(layer.name)
    excluded: set[str] = set()
    unmatched: list[Entry] = []
    for entry in unwanted:
        names = {layer.name for layer in _must_match(everything, entry, "exclude")[0]}
        excluded |= names
        if names.isdisjoint(chosen_by):
            unmatched.append(entry)
    left = [layer for layer in everything if layer.name in chosen_by and layer.name not in excluded]
    if not left:
        raise LayerError(
            f"all {len(chosen_by)} layers that `layers` names are in `exclude` too: nothing is left.\n"
            f"  layers:  {', '.join(map(entry_text, wanted))}\n  exclude: {', '.join(map(entry_text, unwanted))}"
        )
    return Selection(everything[0].module, wanted, left, counts, chosen_by, exact, unmatched)


def as_entries(entries: Any, what: str) -> list[Entry]:
    """`entries` as a list, each checked to be of a kind that can match."""
    single = isinstance(entries, str | re.Pattern | type | nn.Module) or callable(entries)
    if isinstance(entries, Mapping):
        raise TypeError(f"`{what}` is a mapping: give {{layers: regularizer}} as the regularizer, and no `layers`.")
    listed = [entries] if single else list(entries) if isinstance(entries, Iterable) else [entries]
    for entry in listed:
        if entry == "":
            raise LayerError(f"`{what}` has an empty name in it; to mean the model itself, pass the model.")
        if isinstance(entry, type):
            if not issubclass(entry, nn.Module):
                raise LayerError(f"`{what}` has the class {entry.__name__} in it, which is not a torch.nn.Module.")
        elif not isinstance(entry, str | re.Pattern) and not callable(entry):
            raise LayerError(
                f"`{what}` has {entry!r} ({type(entry).__name__}) in it.\n"
                "  use a name, a glob, a compiled expression, a module class, a module,\n"
                "  or a function of (name, module)."
            )
    return listed


def entry_text(entry: Entry) -> str:
    """An entry as a person wrote it."""
    if isinstance(entry, re.Pattern):
        return f"re.compile({entry.pattern!r})"
    if isinstance(entry, str):
        return repr(entry)
    if isinstance(entry, type):
        return entry.__name__
    return f"<{type(entry).__name__}>" if isinstance(entry, nn.Module) else getattr(entry, "__name__", repr(entry))


def _must_match(everything: list[Layer], entry: Entry, what: str) -> tuple[list[Layer], bool]:
    found, exact = matches(everything, entry)
    if not found:
        raise LayerError(_nothing_found(everything, entry, what))
    return found, exact


def matches(everything: list[Layer], entry: Entry) -> tuple[list[Layer], bool]:
    """The layers that `entry` matches, and whether it means just one by its full name."""
    if isinstance(entry, str):
        exact = [layer for layer in everything if entry in layer.aliases] or [
            layer for layer in everything if entry in layer.spellings
        ]
        if exact:
            return exact[:1], True
        return [layer for layer in everything if _glob_matches(entry, layer)], False
    if isinstance(entry, re.Pattern):
        return [layer for layer in everything if any(map(entry.fullmatch, layer.aliases - {""}))], False
    if isinstance(entry, type):
        return [
            layer for layer in everything if any(isinstance(m, entry) for m in (layer.module, *layer.wrappers))
        ], False
    if isinstance(entry, nn.Module):
        return [layer for layer in everything if any(m is entry for m in (layer.module, *layer.wrappers))], True
    return [layer for layer in everything if layer.name and any(entry(n, layer.module) for n in layer.aliases)], False


def _glob_matches(pattern: str, layer: Layer) -> bool:
    fullmatch = glob_expression(pattern).fullmatch
    if any(map(fullmatch, layer.aliases - {""})):
        return True
    # A wrapper's segment is met only where the pattern spells it out: `*` never stands for one.
    spelt = set(pattern.split("."))
    return any(
        fullmatch(name) and set(name.split(".")) & WRAPPER_ATTRIBUTES <= spelt for name in layer.spellings - {""}
    ) and bool(layer.name)


def _nothing_found(everything: list[Layer], entry: Entry, what: str) -> str:
    model, there = type(everything[0].module).__name__, ""
    if isinstance(entry, str):
        near = "".join(f"  {line}\n" for line in _suggestions(everything, entry))
        return f"`{what}` names a module that {model} does not have.\n  asked for:    {entry!r}\n{near}{_SEE_ALL}"
    if isinstance(entry, nn.Module):
        found = type(entry).__name__
        return f"`{what}` has a {found} in it that is not part of this {model} (of a copy of it?).\n{_SEE_ALL}"
    if isinstance(entry, type):
        classes = sorted({type(layer.module).__name__ for layer in everything})
        there = f"  there are:    {', '.join(classes[:12])}{', ...' if len(classes) > 12 else ''}\n"
    return (
        f"`{what}` has {'a class' if there else 'an entry'} in it that matches no module of {model}.\n"
        f"  asked for:    {entry_text(entry)}\n{there}{_SEE_ALL}"
    )


def _suggestions(everything: list[Layer], text: str) -> Iterator[str]:
    """What to write instead of a text that matches nothing."""
    names = [layer.name for layer in everything if layer.name]
    deep = f"**.{text}"
    inside = list(filter(glob_expression(deep).fullmatch, names))
    if inside:
        yield f"did you mean: {deep!r} ({counted(len(inside), 'module')})"
        return
    of_class = [layer for layer in everything if type(layer.module).__name__ == text]
    if of_class:
        yield f"did you mean: the class {text} itself, not its name as a text ({counted(len(of_class), 'module')})"
        return
    if re.search(r"\\|\.\+|\(|\|", text):
        yield f"an expression? write re.compile({text!r})"
        return
    near = list(_respelt(text, names)) or nearest(text, names)
    if near:
        yield f"did you mean: {', '.join(map(repr, near[:3]))}"


def _respelt(text: str, names: list[str]) -> Iterator[str]:
    """`text` with one segment exchanged for one like it, where that matches something."""
    segments = text.split(".")
    known = sorted({segment for name in names for segment in name.split(".")})
    for index, segment in enumerate(segments):
        for other in nearest(segment, known):
            candidate = ".".join([*segments[:index], other, *segments[index + 1 :]])
            for pattern in (candidate, f"**.{candidate}"):
                if candidate != text and any(map(glob_expression(pattern).fullmatch, names)):
                    yield pattern
                    break


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name

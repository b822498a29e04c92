"""Warnings about layers that a recipe does not hook."""

from __future__ import annotations

import re
from collections.abc import Collection

from torch import nn

from hookdrop.utils.select import Layer, named_layers
from hookdrop.utils.tables import some


def skipped_layers(model: nn.Module, known: Collection[str]) -> list[str]:
    """Return a warning for each `ModuleList` in which the recipe recognizes only some of the layers."""
    found = []
    for layer in named_layers(model):
        names = _layers_of(layer)
        others = [name for name, child in names.items() if name not in known and any(child.children())]
        if others and any(name in known for name in names):
            found.append(
                f"skipped {len(others)} of {len(names)} layers in {layer.name!r}: the recipe does not recognize "
                f"{some(others)}."
            )
    return found


def skipped_stacks(model: nn.Module, known: Collection[str], not_samples: Collection[str]) -> list[str]:
    """Return a warning for each `ModuleList` of attention layers in which the recipe hooks none.

    Args:
        model: the model.
        known: the names of the blocks with sites.
        not_samples: the names of the recognized blocks in which the first axis is not the batch.
    """
    found: list[str] = []
    inside = tuple(f"{name}." for name in (*known, *not_samples))
    for layer in named_layers(model):
        names = [name for name, child in _layers_of(layer).items() if _mixes_tokens(child)]
        if not names or layer.name.startswith(inside):
            continue
        if any(f"{one}.".startswith(tuple(f"{name}." for name in names)) for one in known):
            parts = [part for name in names for part in _branches_of(name, model, known)]
            if parts:
                found.append(f"skipped parts of layers in {layer.name!r}: the recipe does not recognize {some(parts)}.")
            continue
        reason = "the recipe does not recognize them."
        if any(one.startswith(tuple(names)) for one in not_samples):
            reason = 'the first axis of their branches is not the batch. mode="batch" includes them.'
        found.append(f"skipped all {len(names)} layers in {layer.name!r}: {reason}")
        inside += tuple(f"{name}." for name in names)
    return found


def _branches_of(name: str, model: nn.Module, known: Collection[str]) -> list[str]:
    """Return the children of a layer that are a branch by their class name, and that contain no known block."""
    if name in known:
        return []
    parts = {f"{name}.{child}": module for child, module in model.get_submodule(name).named_children()}
    branches = [part for part, module in parts.items() if _BRANCH.search(type(module).__name__)]
    return [part for part in branches if not any(f"{one}.".startswith(f"{part}.") for one in known)]


_BRANCH = re.compile("Attention|Mixer|Mamba|MLP|FeedForward|FFN")


def _layers_of(layer: Layer) -> dict[str, nn.Module]:
    children = layer.module.named_children() if isinstance(layer.module, nn.ModuleList) else ()
    return {f"{layer.name}.{name}": child for name, child in children}


def _mixes_tokens(module: nn.Module) -> bool:
    """Whether the module has an attention or another mixer inside, by class name."""
    parts = [type(part).__name__ for name, part in module.named_modules() if name]
    return any(re.search("Attention|Mixer|Mamba", part) for part in parts)

"""Find a model's built-in dropout: the attributes that hold its rates, and the rates that cannot be changed.

A rate can be changed if a forward, according to its source, reads it from an attribute at each call.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hookdrop.recipes.source_analysis import DropoutSource, Path, analyze, safe_getattr
from hookdrop.regularizers import Regularizer, drops_elements
from hookdrop.utils.select import named_layers

_NAME = re.compile(r"\w*drop(_?out|_?path|_?block|_?connect)?(_?rate|_?prob|_?p|_?ratio)?\d*")
_NAMES_IN_DROPOUT = ("p", "prob", "rate")
"""Additional names of the rate in modules that only drop."""


@dataclass(frozen=True)
class Rate:
    """An attribute that a forward reads its drop probability from."""

    name: str
    """The module's name if it only drops, otherwise the module's name and the attribute."""
    module: nn.Module
    attribute: str
    layer: str = ""
    """The module's name."""

    @property
    def value(self) -> float:
        """The current rate."""
        return float(getattr(self.module, self.attribute))


def find_rates(model: nn.Module) -> list[Rate]:
    """Return every rate of the model that can be changed, in `named_modules()` order."""
    found = []
    for layer in named_layers(model):
        for index, name in enumerate(_attributes(layer.module)):
            full = f"{layer.name}.{name}" if layer.name else name
            shown = layer.name if _only_drops(layer.module) and index == 0 else full
            found.append(Rate(shown, layer.module, name, layer.name))
    return found


def find_out_of_reach(model: nn.Module) -> dict[str, list[str]]:
    """Return dropout that cannot be changed: descriptions of the code, with the names of the modules that run it."""
    found: dict[str, list[str]] = {}
    for layer in named_layers(model):
        for line in dict.fromkeys(_describe_out_of_reach(layer.module)):
            found.setdefault(line, []).append(layer.name)
    return found


def _describe_out_of_reach(module: nn.Module) -> Iterator[str]:
    source, kind = _source(module), type(module).__name__
    if _has_own_forward(module):
        yield f"this {kind} instance overrides forward"
    yield from [f"the source of {kind}.{method} is not available" for method in source.unreadable]
    if isinstance(module, Regularizer):
        return
    for call in source.calls:
        if call.elsewhere or not all(_is_accounted_for(module, path) for path in call.rates):
            yield f"{kind}.forward calls {call.code}"
    for name in source.from_config:
        if isinstance(safe_getattr(safe_getattr(module, "config"), name), int | float):
            yield f"{kind}.forward reads config.{name}"
    for name in source.attributes:
        if isinstance(reason := _classify(module, name), str):
            yield f"{kind}.forward reads {name}, {reason}"


def _is_accounted_for(module: nn.Module, path: Path) -> bool:
    """Whether the value at `path` is None, a rate that can be changed, or described by another line."""
    *before, name = path
    if before == ["config"] and "drop" in name:
        return True
    owner: Any = module
    for part in before:
        owner = safe_getattr(owner, part)
    if isinstance(owner, nn.Module) and name in _attributes(owner):
        return True
    return safe_getattr(owner, name) is None or (not before and isinstance(_classify(module, name), str))


def _classify(module: nn.Module, name: str) -> bool | str:
    """Return True for a rate that can be set, a reason if it may be a rate but cannot be set, and False otherwise."""
    value, passed = safe_getattr(module, name), name in _source(module).rate_attributes
    may_be_rate = passed or "drop" in name
    if isinstance(value, Tensor):
        return may_be_rate and value.numel() == 1 and value.is_floating_point() and f"a {type(value).__name__}"
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
        return False
    if isinstance(module, nn.RNNBase) and name == "dropout" and module.num_layers == 1:  # dropout is between layers
        return False
    descriptor = inspect.getattr_static(type(module), name, None)
    if isinstance(descriptor, property) and descriptor.fset is None:
        return may_be_rate and "a property without a setter"
    if passed or _NAME.fullmatch(name) or (name in _NAMES_IN_DROPOUT and _only_drops(module)):
        return True
    return may_be_rate and isinstance(value, float) and 0.0 < value < 1.0 and "which may be a drop rate"


def _attributes(module: nn.Module) -> list[str]:
    if isinstance(module, Regularizer):
        rate = type(module).rate
        return [rate.attribute] if rate is not None and drops_elements(module) else []
    return [name for name in _source(module).attributes if _classify(module, name) is True]


def _only_drops(module: nn.Module) -> bool:
    """Whether a module only drops: its class name says so, and it has no children and no parameters."""
    named_so = any(re.search("drop|stochastic", cls.__name__, re.IGNORECASE) for cls in type(module).__mro__)
    return named_so and not any(module.children()) and not any(True for _ in module.parameters(recurse=False))


def _has_own_forward(module: nn.Module) -> bool:
    """Whether `forward` was overridden on this instance. Its source is not analyzed."""
    own: Any = vars(module).get("forward")
    return own is not None and getattr(inspect.unwrap(own), "__func__", None) is not type(module).forward


def _source(module: nn.Module) -> DropoutSource:
    cls: Any = type(module)
    return analyze(cls)

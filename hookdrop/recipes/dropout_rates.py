"""The dropout rates that a model came with: which attributes hold them, and which rates cannot be changed.

A rate can be changed if a forward reads it from an attribute at each call, according to the source of its class.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hookdrop.injection.select import named_layers
from hookdrop.recipes.source_analysis import DropoutSource, Path, analyze, attribute
from hookdrop.regularizers import Regularizer

_NAME = re.compile(r"\w*drop(_?out|_?path|_?block|_?connect)?(_?rate|_?prob|_?p|_?ratio)?\d*")
_NAMES_IN_DROPOUT = ("p", "prob", "rate")
"""Names of the rate in modules whose class name says that they drop."""


@dataclass(frozen=True)
class Rate:
    """An attribute that a forward reads its drop probability from."""

    name: str
    """The module's name if it does nothing but drop, otherwise the module's name and the attribute."""
    module: nn.Module
    attribute: str

    @property
    def value(self) -> float:
        """The current rate."""
        return float(getattr(self.module, self.attribute))


def rates(model: nn.Module) -> list[Rate]:
    """Every rate of the model that can be changed, in `named_modules()` order."""
    found = []
    for layer in named_layers(model):
        for index, name in enumerate(_attributes(layer.module)):
            full = f"{layer.name}.{name}" if layer.name else name
            found.append(Rate(layer.name if _only_drops(layer.module) and index == 0 else full, layer.module, name))
    return found


def out_of_reach(model: nn.Module) -> dict[str, list[str]]:
    """Dropout that cannot be changed: a line about the code, and the names of the modules that run it."""
    found: dict[str, list[str]] = {}
    for layer in named_layers(model):
        for line in dict.fromkeys(_lines(layer.module)):
            found.setdefault(line, []).append(layer.name)
    return found


def _lines(module: nn.Module) -> Iterator[str]:
    source, kind = _source(module), type(module).__name__
    if _has_own_forward(module):
        yield f"this {kind} has another forward than its class"
    yield from [f"the source of {kind}.{method} can't be read" for method in source.unreadable]
    if isinstance(module, Regularizer):
        return
    for call in source.calls:
        if call.elsewhere or not all(_is_accounted_for(module, path) for path in call.rates):
            yield f"{kind}.forward calls {call.code}"
    for name in source.from_config:
        if isinstance(attribute(attribute(module, "config"), name), int | float):
            yield f"{kind}.forward reads config.{name}"
    for name in source.attributes:
        if isinstance(why_not := _verdict(module, name), str):
            yield f"{kind}.forward reads {name}, {why_not}"


def _is_accounted_for(module: nn.Module, path: Path) -> bool:
    """Whether the value at `path` is None, a listed rate, or reported in another line."""
    *before, name = path
    if before == ["config"] and "drop" in name:
        return True
    owner: Any = module
    for part in before:
        owner = attribute(owner, part)
    if isinstance(owner, nn.Module) and name in _attributes(owner):
        return True
    return attribute(owner, name) is None or (not before and isinstance(_verdict(module, name), str))


def _verdict(module: nn.Module, name: str) -> bool | str:
    """True for a rate that can be set; a reason for what may be a rate and cannot be set; False for the rest."""
    value, passed = attribute(module, name), name in _source(module).rate_attributes
    may_be_rate = passed or "drop" in name
    if isinstance(value, Tensor):
        return may_be_rate and value.numel() == 1 and value.is_floating_point() and f"a {type(value).__name__}"
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
        return False
    if isinstance(module, nn.RNNBase) and name == "dropout" and module.num_layers == 1:  # they drop between layers
        return False
    kept = inspect.getattr_static(type(module), name, None)
    if isinstance(kept, property) and kept.fset is None:
        return may_be_rate and "a property without a setter"
    if passed or _NAME.fullmatch(name) or (name in _NAMES_IN_DROPOUT and _only_drops(module)):
        return True
    return may_be_rate and isinstance(value, float) and 0.0 < value < 1.0 and "which may be a drop rate"


def _attributes(module: nn.Module) -> list[str]:
    if isinstance(module, Regularizer):
        return [module.rate_name] if module.drops and module.rate_name is not None else []
    return [name for name in _source(module).attributes if _verdict(module, name) is True]


def _only_drops(module: nn.Module) -> bool:
    """Whether dropping is all that a module does: its class says so, and it has no children and no weights."""
    says_so = any(re.search("drop|stochastic", cls.__name__, re.IGNORECASE) for cls in type(module).__mro__)
    return says_so and not any(module.children()) and not any(True for _ in module.parameters(recurse=False))


def _has_own_forward(module: nn.Module) -> bool:
    """Whether a forward was set on this module alone, whose source is not analyzed."""
    own: Any = vars(module).get("forward")
    return own is not None and getattr(inspect.unwrap(own), "__func__", None) is not type(module).forward


def _source(module: nn.Module) -> DropoutSource:
    cls: Any = type(module)
    return analyze(cls)

"""The dropout that a model has by itself: where its rates are kept, and read at each forward.

A rate can be changed where a forward reads it from an attribute at each call. Whether it does is read from the source
of its class: of `forward`, and of the methods that it calls.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hookdrop.injection.select import walk
from hookdrop.recipes.source_analysis import DropCall, Reading, read
from hookdrop.regularizers import Regularizer

_NAME = re.compile(r"\w*drop(_?out|_?path|_?block|_?connect)?(_?rate|_?prob|_?p|_?ratio)?\d*")
_OTHER_NAMES = ("p", "prob", "rate")
"""What modules whose class says that they drop call their rate, if not by a name with "drop" in it."""


@dataclass(frozen=True)
class Rate:
    """An attribute that a forward reads its drop probability from."""

    name: str
    """Of a module that does nothing but drop: its name; else that and the attribute."""
    module: nn.Module
    attribute: str

    @property
    def value(self) -> float:
        """What it is now."""
        return float(getattr(self.module, self.attribute))


def rates(model: nn.Module) -> list[Rate]:
    """Every rate of the model that can be changed, in `named_modules()` order."""
    return [
        Rate(_rate_name(layer.name, layer.module, attribute, index), layer.module, attribute)
        for layer in walk(model)
        for index, attribute in enumerate(_attributes(layer.module))
    ]


def out_of_reach(model: nn.Module) -> dict[str, list[str]]:
    """What can't be changed: a line about the code, and the names of the modules that run it."""
    found: dict[str, list[str]] = {}
    for layer in walk(model):
        for line in dict.fromkeys(_lines(layer.module)):
            found.setdefault(line, []).append(layer.name)
    return found


def _lines(module: nn.Module) -> Iterator[str]:
    reading, kind = _reading(module), type(module).__name__
    if _is_replaced(module):
        yield f"the forward of this {kind} is another than its class has"
    yield from [f"the source of {kind}.{method} can't be read" for method in reading.unread]
    if isinstance(module, Regularizer):
        return
    for call in reading.calls:
        if _is_out_of_reach(module, call):
            yield f"{kind}.forward calls {call.code}"
    for name in reading.from_config:
        if isinstance(getattr(getattr(module, "config", None), name, None), int | float):
            yield f"{kind}.forward reads config.{name}"
    for attribute in reading.attributes:
        if (why := _why_not(module, attribute)) is not None:
            yield f"{kind}.forward reads {attribute}, {why}"


def _is_out_of_reach(module: nn.Module, call: DropCall) -> bool:
    return call.elsewhere or not all(_is_known(module, path) for path in call.rates)


def _is_known(module: nn.Module, path: tuple[str, ...]) -> bool:
    """Whether what stands below `module` there is a rate that is listed, or none, or is told otherwise."""
    *before, attribute = path
    for name in before:
        module = getattr(module, name, None)  # type: ignore[assignment]
    if before == ["config"] and "drop" in attribute:
        return True
    value = getattr(module, attribute, None)
    if isinstance(module, nn.Module) and attribute in _attributes(module):
        return True
    return value is None or (not before and _why_not(module, attribute) is not None)


def _why_not(module: nn.Module, attribute: str) -> str | None:
    """Why what a forward reads, and may be a rate, is none that can be set."""
    value, by_name = getattr(module, attribute, None), "drop" in attribute
    if not by_name and attribute not in _given_as_rate(module):
        return None
    if isinstance(value, Tensor):
        return f"a {type(value).__name__}" if value.numel() == 1 and value.is_floating_point() else None
    if not _is_probability(value) or _has_no_effect(module, attribute):
        return None
    if not _can_be_set(module, attribute):
        return "a property without a setter"
    between = isinstance(value, float) and 0.0 < value < 1.0
    return "which may be a drop rate" if between and attribute not in _attributes(module) else None


def _attributes(module: nn.Module) -> list[str]:
    if isinstance(module, Regularizer):
        return [module.rate_name] if module.drops and module.rate_name is not None else []
    return [attribute for attribute in _reading(module).attributes if _is_rate(module, attribute)]


def _is_rate(module: nn.Module, attribute: str) -> bool:
    if not _is_probability(getattr(module, attribute, None)) or not _can_be_set(module, attribute):
        return False
    if _has_no_effect(module, attribute):
        return False
    by_name = _NAME.fullmatch(attribute) or (attribute in _OTHER_NAMES and drops_only(module))
    return bool(by_name) or attribute in _given_as_rate(module)


def _is_probability(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0.0 <= value <= 1.0


def _given_as_rate(module: nn.Module) -> set[str]:
    """The attributes that its calls of dropout have as their rate."""
    return {path[0] for call in _reading(module).calls for path in call.rates if len(path) == 1}


def _can_be_set(module: nn.Module, attribute: str) -> bool:
    kept = inspect.getattr_static(type(module), attribute, None)
    return not isinstance(kept, property) or kept.fset is not None


def _has_no_effect(module: nn.Module, attribute: str) -> bool:
    """Recurrent layers of PyTorch drop between layers."""
    return isinstance(module, nn.RNNBase) and attribute == "dropout" and module.num_layers == 1


def drops_only(module: nn.Module) -> bool:
    """Whether dropping is all that a module does: it has no other module and no weight."""
    names = [cls.__name__ for cls in type(module).__mro__]
    says_so = any(re.search("drop|stochastic", name, re.IGNORECASE) for name in names)
    return says_so and not any(module.children()) and not any(True for _ in module.parameters(recurse=False))


def _rate_name(name: str, module: nn.Module, attribute: str, index: int) -> str:
    """Of what only drops the name alone; where it has several rates, that is the first one's."""
    if drops_only(module) and index == 0:
        return name
    return f"{name}.{attribute}" if name else attribute


def _is_replaced(module: nn.Module) -> bool:
    """Whether somebody gave this module alone another forward, which is not read."""
    own: Any = vars(module).get("forward")
    return own is not None and getattr(inspect.unwrap(own), "__func__", None) is not type(module).forward


def _reading(module: nn.Module) -> Reading:
    cls: Any = type(module)
    return read(cls)

"""Adapters that wrap other libraries' modules and functions as regularizers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

from hookdrop.core.regularizer import Rate, Regularizer

_SAME = ("AlphaDropout", "Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "DropPath", "FeatureAlphaDropout")
_EQUIVALENTS = dict(zip(_SAME, _SAME, strict=True), StochasticDepth="DropPath")
"""Names of other libraries' classes, and the equivalent hookdrop classes."""
_EQUIVALENTS |= dict.fromkeys(("DropBlock2d", "DropBlock3d"), "DropBlock")
RATE_NAMES = ("p", "drop_prob", "drop_rate")


class ForeignModule(Regularizer):
    """Adapter for another library's tensor-to-tensor module, such as timm's `DropPath`, with its rate `attribute`."""

    def __init__(self, module: nn.Module, attribute: str = "") -> None:
        super().__init__()
        self.module = copy.deepcopy(module).train()  # with `inplace=False`
        self.attribute = attribute
        parts: list[Any] = list(self.module.modules())
        for part in parts:
            if getattr(part, "inplace", False) is True:
                part.inplace = False

    @property
    def p(self) -> float:
        return float(getattr(self.module, self.attribute))

    @p.setter
    def p(self, value: float) -> None:
        setattr(self.module, self.attribute, value)

    def regularize(self, x: Tensor, rate: float | None) -> Tensor:
        module = self.module
        if rate is not None and rate != self.p:
            # Another thread may be running the module at its rate.
            module = copy.deepcopy(module)
            setattr(module, self.attribute, float(rate))
            self.module = module
        y: Tensor = module(x)
        return y

    @property
    def independent_samples(self) -> bool:
        return type(self.module).__module__ == "torch.nn.modules.dropout"

    @property
    def graph_break(self) -> str:
        instead = "remove fullgraph=True"
        if ours := _EQUIVALENTS.get(self.title):
            settings = [(name, getattr(self.module, name, None)) for name in ("block_size", "mode")]
            more = "".join(f", {name}={value!r}" for name, value in settings if value is not None)
            instead = f"use hookdrop.{ours}(p={self.p:g}{more}), which compiles without a graph break"
        return f"{self!r} stores its rate as a Python float, which compiled code treats as a constant.\n  {instead}."

    @property
    def _given(self) -> nn.Module:
        return self.module

    @property
    def title(self) -> str:
        return type(self.module).__name__

    def __repr__(self) -> str:
        return repr(self.module)


class ForeignModuleWithoutRate(ForeignModule):
    """A `ForeignModule` that a schedule cannot drive."""

    rate: ClassVar[Rate | None] = None
    graph_break = ""


class ForeignFunction(Regularizer):
    """Adapter for a picklable tensor-to-tensor function. It has no rate, so a schedule cannot drive it."""

    rate: ClassVar[Rate | None] = None

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    @property
    def _given(self) -> Callable[[Tensor], Tensor]:
        return self.function

    def regularize(self, x: Tensor, rate: None) -> Tensor:
        return self.function(x)

    @property
    def title(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    def __repr__(self) -> str:
        return self.title


def adapted(given: object) -> Regularizer:
    """Return the adapter of another library's module without state, or of a function."""
    if isinstance(given, type):
        raise TypeError(f"the regularizer must be an instance, got the class: write {given.__name__}(...).")
    if isinstance(given, nn.Module):
        rates = [name for name in RATE_NAMES if type(getattr(given, name, None)) in (int, float)]
        return ForeignModule(given, rates[0]) if rates else ForeignModuleWithoutRate(given)
    if callable(given):
        return ForeignFunction(given)
    raise TypeError(
        f"the regularizer must be a module, a function, a string or a mapping, got {given!r} "
        f"({type(given).__name__}).\n  for example: DropBlock(p=0.1, block_size=7)"
    )

"""Adapters that let modules and functions from elsewhere work as regularizers."""

from __future__ import annotations

import copy
import inspect
import numbers
import pickle
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

from hookdrop.errors import InjectionError
from hookdrop.regularizers.base import Regularizer

# Which class of ours does the same as another library's, by its name.
_OURS = {name: name for name in ("AlphaDropout", "Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "DropPath")}
_OURS |= {"FeatureAlphaDropout": "FeatureAlphaDropout", "StochasticDepth": "DropPath"}
_OURS |= {"DropBlock2d": "DropBlock", "DropBlock3d": "DropBlock"}
RATE_NAMES = ("p", "drop_prob", "drop_rate")


class ForeignModule(Regularizer):
    """A module of tensor -> tensor from elsewhere, such as `nn.Dropout2d(0.1)` or timm's `DropPath`.

    Args:
        module: a module without parameters and buffers. The adapter uses a copy with `inplace=False`; its rate is the
            first of `p`, `drop_prob`, `drop_rate` that it has.
    """

    rate_name: ClassVar[str | None] = None

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(module).train()
        for part in self.module.modules():
            if getattr(part, "inplace", False) is True:
                part.inplace = False  # type: ignore[assignment]
        self.rate_attribute = next((n for n in RATE_NAMES if _is_rate(getattr(module, n, None))), None)
        if self.rate_attribute is not None:
            self.valid_rate(self.rate)

    @property
    def rate(self) -> float | None:
        return None if self.rate_attribute is None else float(getattr(self.module, self.rate_attribute))

    def set_rate(self, value: float) -> None:
        assert self.rate_attribute is not None
        setattr(self.module, self.rate_attribute, value)

    def regularize(self, x: Tensor) -> Tensor:
        return self.module(x)  # type: ignore[no-any-return]

    @property
    def graph_break(self) -> str:
        if self.rate is None:
            return ""
        instead = "leave out fullgraph=True"
        if ours := _OURS.get(self.title):
            settings = [(name, getattr(self.module, name, None)) for name in ("block_size", "mode")]
            more = "".join(f", {name}={value!r}" for name, value in settings if value is not None)
            instead = f"hookdrop.{ours}(p={self.rate:g}{more}) goes into the graph"
        return f"{self!r} has its rate as a Python float, which compiled code would keep for good.\n  {instead}."

    def settings(self) -> dict[str, Any]:
        names = [name for name in inspect.signature(type(self.module).__init__).parameters if name != "self"]
        return {name: getattr(self.module, name) for name in names}

    @property
    def title(self) -> str:
        return type(self.module).__name__

    def __repr__(self) -> str:
        return repr(self.module)


class ForeignFunction(Regularizer):
    """A function of tensor -> tensor. It has no rate, so a schedule can't drive it.

    Args:
        function: must be picklable with the model, so defined at the top of a module.
    """

    rate_name: ClassVar[str | None] = None

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def regularize(self, x: Tensor) -> Tensor:
        return self.function(x)

    def settings(self) -> dict[str, Any]:
        return {"function": self.function}

    @property
    def title(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    def __repr__(self) -> str:
        return self.title


def as_regularizer(given: object) -> Regularizer:
    """`given` as a regularizer: a regularizer, a module or a function.

    Raises:
        TypeError: a class instead of an instance, or another object.
        InjectionError: a module with state, or an object that can't be pickled.
    """
    if isinstance(given, type):
        raise TypeError(f"the regularizer is the class {given.__name__}, not an instance of it: {_call(given)}.")
    found: Regularizer
    if isinstance(given, nn.Module):
        _must_be_stateless(given)
        found = given if isinstance(given, Regularizer) else ForeignModule(given)
    elif callable(given):
        found = ForeignFunction(given)
    else:
        raise TypeError(
            f"the regularizer must be a module, a function, a text or a mapping, got {given!r} "
            f"({type(given).__name__}).\n  for example: DropBlock(p=0.1, block_size=7)"
        )
    if found.rate_name is not None and not hasattr(found, found.rate_name):
        raise InjectionError(
            f"{type(found).__name__} has no attribute {found.rate_name!r}, which its rate_name says is its rate."
        )
    must_pickle(found, "the regularizer")
    return found


def _must_be_stateless(module: nn.Module) -> None:
    owned = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    if owned:
        raise InjectionError(
            f"{type(module).__name__} owns parameters or buffers ({', '.join(owned[:3])}): no optimizer and "
            "no state_dict would see them.\n  make it part of the model, or write it without state."
        )


def must_pickle(value: object, what: str) -> None:
    """Raise `InjectionError` if a model with `value` in a hook could not be pickled."""
    try:
        pickle.dumps(value)
    except Exception as error:
        raise InjectionError(
            f"{what} can't be pickled ({error}), so torch.save(model) and worker processes would fail.\n"
            "  instead of a lambda or a local function, use a function or class at the top of a module."
        ) from error


def _is_rate(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _call(cls: type) -> str:
    if not callable(cls):
        return "write it with its settings"
    first = next((n for n in RATE_NAMES if n in inspect.signature(cls).parameters), None)
    return f"write {cls.__name__}({first}=0.1)" if first else f"write {cls.__name__}(...)"

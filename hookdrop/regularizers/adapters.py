"""Other people's modules and functions, made to behave like a regularizer."""

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

# By the name of somebody else's class, ours that does the same, where it has another name.
_OURS = {"StochasticDepth": "DropPath", "DropBlock2d": "DropBlock", "DropBlock3d": "DropBlock"}
_SAME_HERE = ("Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout", "FeatureAlphaDropout", "DropPath")
RATE_NAMES = ("p", "drop_prob", "drop_rate")


class ForeignModule(Regularizer):
    """A module of tensor -> tensor that hookdrop did not write, such as `nn.Dropout2d(0.1)` or timm's `DropPath`.

    Args:
        module: a module without parameters and buffers; it is copied, `inplace` is set False on the copy, and
            its rate is the first of `p`, `drop_prob`, `drop_rate` that it has.
    """

    rate_name: ClassVar[str | None] = None

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(module).train()
        for part in self.module.modules():
            if getattr(part, "inplace", False) is True:
                part.inplace = False  # type: ignore[assignment]  # a plain bool, which nn.Module can't declare
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
        ours = self.title if self.title in _SAME_HERE else _OURS.get(self.title)
        settings = [(name, getattr(self.module, name, None)) for name in ("block_size", "mode")]
        more = "".join(f", {name}={value!r}" for name, value in settings if value is not None)
        instead = f"hookdrop.{ours}(p={self.rate:g}{more}) goes into the graph" if ours else "leave out fullgraph=True"
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
    """A function of tensor -> tensor; it has no rate, so that nothing can schedule it.

    Args:
        function: picklable, as the model that it is hooked on must be: defined at the top of a module.
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
    """`given` as a regularizer: one of ours, a module, or a function.

    Raises:
        TypeError: a class instead of an instance, or nothing that can regularize.
        InjectionError: a module with state, or something that can't be pickled.
    """
    if isinstance(given, type):
        raise TypeError(f"the regularizer is the class {given.__name__}, not an instance of it: {_call(given)}.")
    if isinstance(given, nn.Module):
        _must_be_stateless(given)
    if isinstance(given, Regularizer):
        found: Regularizer = given
        if given.rate_name is not None and not hasattr(given, given.rate_name):
            raise InjectionError(
                f"{type(given).__name__} has no attribute {given.rate_name!r}, which its rate_name says is its rate."
            )
    elif isinstance(given, nn.Module):
        found = ForeignModule(given)
    elif callable(given):
        found = ForeignFunction(given)
    else:
        raise TypeError(
            f"the regularizer must be a module, a function, a text or a mapping, got {given!r} "
            f"({type(given).__name__}).\n  for example: DropBlock(p=0.1, block_size=7)"
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
    """Raise `InjectionError` if a model that carries `value` in a hook could not be pickled."""
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

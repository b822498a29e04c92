"""What every regularizer has in common."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.compiler import is_compiling

from hookdrop.errors import ShapeError
from hookdrop.utils.validation import as_rate_tensor, rate


class Regularizer(nn.Module):
    """A module of tensor -> tensor that regularizes in training mode and returns its input otherwise.

    A subclass names the attribute that a schedule drives (`rate_name = None` if it has none), keeps its settings in
    attributes named as the arguments of its `__init__`, and defines one of two methods:

    * `regularize_at(x, rate)` gets the rate as an argument, and so works in compiled graphs too;
    * `regularize(x)` reads the rate from its attribute.

    Example:
        >>> class Shrink(Regularizer):
        ...     rate_name = "amount"
        ...     def __init__(self, amount=0.1):
        ...         super().__init__()
        ...         self.amount = self.valid_rate(amount)
        ...     def regularize(self, x):
        ...         return x * (1 - self.amount)
        >>> Shrink(0.5)(torch.ones(2)), Shrink(0.5).eval()(torch.ones(2))
        (tensor([0.5000, 0.5000]), tensor([1., 1.]))
    """

    rate_name: ClassVar[str | None] = "p"
    """The attribute that a schedule drives; None if there is no rate."""

    max_rate: ClassVar[float] = 1.0
    open_end: ClassVar[bool] = False
    """Whether `max_rate` itself is out of range."""

    neutral: ClassVar[float] = 0.0
    """The rate at which it does nothing."""

    probability: ClassVar[bool] = True
    """Whether the rate is the part that is dropped in expectation, so that 1 - rate is what is kept."""

    drops: ClassVar[bool] = True
    """Whether elements of the output stop depending on the input; noise does not do that."""

    in_backward: ClassVar[bool] = False
    """Whether it edits the gradient alone, so that a forward shows nothing of it."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _refuse_reserved_names(cls)
        nearest = next(vars(one) for one in cls.__mro__ if {"regularize", "regularize_at"} & vars(one).keys())
        if "regularize_at" not in nearest:
            # A class that changes `regularize` alone must not inherit a `regularize_at` that does something else.
            cls.regularize_at = Regularizer.regularize_at  # type: ignore[method-assign]
        elif cls.regularize_at is not Regularizer.regularize_at:
            cls._regularize_at = cls.regularize_at  # type: ignore[method-assign]

    def regularize(self, x: Tensor) -> Tensor:
        """Regularize `x` at the regularizer's rate in either mode, without writing in place."""
        rate = self.rate
        return self._regularize_at(x, as_rate_tensor(rate) if rate is not None and is_compiling() else rate)

    def regularize_at(self, x: Tensor, rate: Any) -> Tensor:
        """Regularize `x` at the given rate: hooks call this.

        This default serves a class that has only `regularize`. If the class has a rate, it runs outside of graphs.

        Args:
            x: the tensor.
            rate: a float; in compiled code a 0-d float64 tensor on the CPU, so that one graph serves all rates; None
                if the class has no rate.
        """
        if rate is None or rate == self.rate:
            return self.regularize(x)
        # Another thread may be using this object at its rate.
        twin = copy.deepcopy(self)
        twin.set_rate(float(rate))
        return twin.regularize(x)

    def _regularize_at(self, x: Tensor, rate: Any) -> Tensor:
        """The nearest `regularize_at` that is not the default."""
        raise NotImplementedError(f"{self.title} must define regularize_at(self, x, rate) or regularize(self, x).")

    def forward(self, x: Tensor) -> Tensor:
        """Regularize in training mode; in eval mode and at the neutral rate return `x` itself."""
        return self.regularize(x) if self.training and self.rate != self.neutral else x

    @property
    def graph_break(self) -> str:
        """Why it can't be part of a compiled graph, and what to do; empty if it can."""
        if self.rate is None or type(self).regularize_at is not Regularizer.regularize_at:
            return ""
        return (
            f"{self.title} reads its {self.rate_name} as a Python float, which compiled code would keep for good.\n"
            f"  let {type(self).__name__} have regularize_at(self, x, rate), which is given the rate as a tensor."
        )

    @property
    def rate(self) -> float | None:
        """The value of the attribute `rate_name`."""
        return None if self.rate_name is None else getattr(self, self.rate_name)

    def set_rate(self, value: float) -> None:
        """Set the rate to a valid value."""
        assert self.rate_name is not None
        setattr(self, self.rate_name, value)

    def valid_rate(self, value: object) -> float:
        """`value` as a float, or a `ValueError` or `TypeError` that names the range."""
        return rate(value, self.rate_name or "p", self.title, self.max_rate, open_end=self.open_end)

    def check(self, shape: Sequence[int]) -> None:
        """Raise `ShapeError` if it can't regularize a tensor of this shape."""

    def reading(self, shape: Sequence[int]) -> str:
        """How it reads the axes of a tensor of this shape, as in `"C=56 H=56 W=96"`."""
        return ""

    def doubts(self, shape: Sequence[int]) -> list[str]:
        """Warnings about a shape that works but is probably not intended."""
        return []

    def settings(self) -> dict[str, Any]:
        """The arguments of `__init__` that make this again; `AttributeError` if one is not kept as an attribute."""
        return {name: getattr(self, name) for name in _settings_of(type(self))}

    @property
    def title(self) -> str:
        """The name in messages and tables."""
        return type(self).__name__

    def extra_repr(self) -> str:
        """The settings as `parse` reads them: those kept as attributes; keyword-only ones if not the default."""
        return ", ".join(
            f"{name}={getattr(self, name)!r}"
            for name, one in _settings_of(type(self)).items()
            if hasattr(self, name) and (one.kind != one.KEYWORD_ONLY or getattr(self, name) != one.default)
        )


def _refuse_reserved_names(cls: type[Regularizer]) -> None:
    """Raise `TypeError` if a rate or a setting has the name of a member of every regularizer."""
    # An argument `rate` may be kept under another name: the property returns its value.
    arguments = [name for name in _settings_of(cls) if name in vars(Regularizer) and name != "rate"]
    for name, what in [(cls.rate_name, "rate_name"), *((name, "an argument of __init__") for name in arguments)]:
        found = inspect.getattr_static(cls, name or "", None)
        settable = isinstance(found, property) and found.fset is not None
        if name is not None and hasattr(Regularizer, name) and not settable:
            raise TypeError(
                f"{cls.__name__}: {what} is {name!r}, which means something else in every Regularizer.\n"
                "  choose another name for the attribute and the argument of __init__, such as 'p' or 'amount'."
            )


def _settings_of(cls: type) -> dict[str, inspect.Parameter]:
    """The named arguments of `__init__` except `keep_prob`, which is another spelling of `p`."""
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(cls.__init__).parameters  # type: ignore[misc]
    return {
        name: one for name, one in parameters.items() if name not in ("self", "keep_prob") and one.kind not in several
    }


def map_reading(shape: Sequence[int], channel: int) -> str:
    """`C=256 H=14 W=14` for a tensor with its channels at axis `channel`."""
    spatial = {1: ["L"], 2: ["H", "W"], 3: ["D", "H", "W"]}.get(len(shape) - 2, [])
    sizes = [size for axis, size in enumerate(shape) if axis not in (0, channel)]
    named = [f"{name}={size}" for name, size in zip(spatial, sizes, strict=False)]
    return " ".join([f"C={shape[channel]}", *named])


def nhwc_doubt(shape: Sequence[int], channel: int, instead: str) -> list[str]:
    """A warning if the shape looks like (N, H, W, C), which would be read as (N, C, H, W)."""
    if len(shape) == 4 and channel == 1 and shape[1] == shape[2] != shape[3]:
        return [f"reads {tuple(shape)} as {map_reading(shape, 1)}; that looks like NHWC: {instead}"]
    return []


def needs_samples(shape: Sequence[int]) -> None:
    """Raise `ShapeError` for a tensor without a batch axis."""
    if not shape:
        raise ShapeError("got a 0-d tensor: there are no samples along axis 0.")

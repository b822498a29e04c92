"""The base class of all regularizers."""

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
    """A module that maps a tensor to a tensor. It regularizes in training mode and is the identity in eval mode.

    A subclass sets `rate_name` to the attribute that a schedule drives (None if there is none), stores each argument of
    `__init__` in an attribute of the same name, and defines one of two methods:

    * `regularize_at(x, rate)` receives the rate as an argument, and therefore also works in compiled graphs;
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
    """The attribute that a schedule drives, or None if there is no rate."""

    max_rate: ClassVar[float] = 1.0
    open_end: ClassVar[bool] = False
    """Whether the range excludes `max_rate` itself."""

    neutral: ClassVar[float] = 0.0
    """The rate at which the regularizer is the identity."""

    probability: ClassVar[bool] = True
    """Whether the rate is the expected fraction of dropped elements, so that 1 - rate is the fraction kept."""

    drops: ClassVar[bool] = True
    """Whether dropped elements no longer depend on the input. This is False for noise."""

    in_backward: ClassVar[bool] = False
    """Whether it edits only the gradient and leaves the forward output unchanged."""

    only_at: ClassVar[str | None] = None
    """`"output"` or `"input"` if it is only meaningful there. None: at both."""

    keeps_shape: bool = True
    """Whether the result has the shape of the input."""

    hook_kind: str = ""
    """Which hook it needs: one that passes further tensors to `regularize_at` (see `injection.plan`), or empty."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _check_reserved_names(cls)
        if {"regularize", "regularize_at"} & vars(cls).keys() and "independent_samples" not in vars(cls):
            cls.independent_samples = False  # type: ignore[assignment, method-assign]
        nearest = next(vars(one) for one in cls.__mro__ if {"regularize", "regularize_at"} & vars(one).keys())
        if "regularize_at" not in nearest:
            # A class that overrides only `regularize` must not inherit an unrelated `regularize_at`.
            cls.regularize_at = Regularizer.regularize_at  # type: ignore[method-assign]
        elif cls.regularize_at is not Regularizer.regularize_at:
            cls._regularize_at = cls.regularize_at  # type: ignore[method-assign]

    def regularize(self, x: Tensor) -> Tensor:
        """Regularize `x` at the current rate, in training and eval mode, without modifying `x` in place."""
        rate = self.rate
        return self._regularize_at(x, as_rate_tensor(rate) if rate is not None and is_compiling() else rate)

    def regularize_at(self, x: Tensor, rate: Any) -> Tensor:
        """Regularize `x` at the given rate. Hooks call this method.

        This default is for classes that define only `regularize`. If such a class has a rate, it causes a graph break.

        Args:
            x: the tensor.
            rate: a float, or a 0-d float64 CPU tensor in compiled code, so that one graph serves all rates; None if the
                class has no rate.
        """
        if rate is None or rate == self.rate:
            return self.regularize(x)
        # Another thread may be using this object, so use a copy at the other rate.
        twin = copy.deepcopy(self)
        twin.set_rate(float(rate))
        return twin.regularize(x)

    def _regularize_at(self, x: Tensor, rate: Any) -> Tensor:
        """The most derived `regularize_at` that is not the default."""
        raise NotImplementedError(f"{self.title} must define regularize_at(self, x, rate) or regularize(self, x).")

    def forward(self, x: Tensor) -> Tensor:
        """Regularize in training mode. Return `x` itself in eval mode and at the neutral rate."""
        return self.regularize(x) if self.training and self.rate != self.neutral else x

    @property
    def graph_break(self) -> str:
        """The reason why it cannot be part of a compiled graph, with the fix; empty if it can."""
        if self.rate is None or type(self).regularize_at is not Regularizer.regularize_at:
            return ""
        return (
            f"{self.title} reads its {self.rate_name} as a Python float, which compiled code treats as a constant.\n"
            f"  define {type(self).__name__}.regularize_at(self, x, rate), which receives the rate as a tensor."
        )

    def for_layer(self, model: nn.Module, name: str) -> Regularizer:
        """Return the regularizer for one layer of a model: this one, or one with settings that the model determines.

        Raises:
            LayerError: it does not support the layer.
        """
        return self

    @property
    def independent_samples(self) -> bool:
        """Whether each sample of a batch (axis 0) is regularized as if it were alone in the batch.

        `Injection.predict` then repeats its input and draws several samples in one forward. False is always correct. A
        subclass may define it as `independent_samples = True`, in the class that defines how to regularize.
        """
        return False

    @property
    def masks_per_batch(self) -> int | None:
        """For fixed masks, of which each applies to one of so many equal groups of consecutive rows: their number.

        `Injection.predict` then runs each batch repeated so often, [all rows, all rows, ...], so that each row gets
        each mask.
        """
        return None

    @property
    def rate(self) -> float | None:
        """The value of the attribute `rate_name`."""
        return None if self.rate_name is None else getattr(self, self.rate_name)

    def set_rate(self, value: float) -> None:
        """Set the rate. The value is not validated."""
        assert self.rate_name is not None
        setattr(self, self.rate_name, value)

    def valid_rate(self, value: object) -> float:
        """Return `value` as a float, or raise a `ValueError` or `TypeError` that states the valid range."""
        return rate(value, self.rate_name or "p", self.title, self.max_rate, open_end=self.open_end)

    def check(self, shape: Sequence[int]) -> None:
        """Raise `ShapeError` if it cannot regularize a tensor of this shape."""

    def reading(self, shape: Sequence[int]) -> str:
        """Describe how it interprets the axes of a tensor of this shape, as in `"C=56 H=56 W=96"`."""
        return ""

    def shape_warnings(self, shape: Sequence[int]) -> list[str]:
        """Return warnings about a shape that works but is probably not intended."""
        return []

    def settings(self) -> dict[str, Any]:
        """The arguments that recreate this object. Raises `AttributeError` if one is not stored as an attribute."""
        return {name: getattr(self, name) for name in _init_parameters(type(self))}

    @property
    def title(self) -> str:
        """The name used in messages and tables."""
        return type(self).__name__

    def extra_repr(self) -> str:
        """The settings in the syntax of `parse`. Keyword-only settings are shown only if they are not the default."""
        return ", ".join(
            f"{name}={getattr(self, name)!r}"
            for name, one in _init_parameters(type(self)).items()
            if hasattr(self, name) and (one.kind != one.KEYWORD_ONLY or getattr(self, name) != one.default)
        )


def _check_reserved_names(cls: type[Regularizer]) -> None:
    """Raise `TypeError` if a rate or a setting has the name of a member of `Regularizer`."""
    # An argument `rate` is allowed: the property `rate` returns its value.
    arguments = [name for name in _init_parameters(cls) if name in vars(Regularizer) and name != "rate"]
    for name, what in [(cls.rate_name, "rate_name"), *((name, "an argument of __init__") for name in arguments)]:
        found = inspect.getattr_static(cls, name or "", None)
        settable = isinstance(found, property) and found.fset is not None
        if name is not None and hasattr(Regularizer, name) and not settable:
            raise TypeError(
                f"{cls.__name__}: {what} is {name!r}, which is a reserved name of Regularizer.\n"
                "  rename the attribute and the argument of __init__, for example to 'p' or 'amount'."
            )


def _init_parameters(cls: type) -> dict[str, inspect.Parameter]:
    """The named parameters of `__init__`, except `keep_prob`, which is an alternative to `p`."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(cls.__init__).parameters  # type: ignore[misc]
    return {
        name: one for name, one in parameters.items() if name not in ("self", "keep_prob") and one.kind not in variadic
    }


def describe_map(shape: Sequence[int], channel: int) -> str:
    """Return a text such as `C=256 H=14 W=14` for a tensor with its channels at axis `channel`."""
    spatial = {1: ["L"], 2: ["H", "W"], 3: ["D", "H", "W"]}.get(len(shape) - 2, [])
    sizes = [size for axis, size in enumerate(shape) if axis not in (0, channel)]
    named = [f"{name}={size}" for name, size in zip(spatial, sizes, strict=False)]
    return " ".join([f"C={shape[channel]}", *named])


def nhwc_warnings(shape: Sequence[int], channel: int, instead: str) -> list[str]:
    """Return a warning if the shape looks like (N, H, W, C) but would be interpreted as (N, C, H, W)."""
    if len(shape) == 4 and channel == 1 and shape[1] == shape[2] != shape[3]:
        return [f"reads {tuple(shape)} as {describe_map(shape, 1)}; that looks like NHWC: {instead}"]
    return []


def check_batch_axis(shape: Sequence[int]) -> None:
    """Raise `ShapeError` for a tensor without a batch axis."""
    if not shape:
        raise ShapeError("got a 0-d tensor, which has no batch axis.")

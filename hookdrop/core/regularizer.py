"""Rates, the numbers that schedules drive, and the base class of all regularizers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from hookdrop.core.arguments import NamedArguments, as_rate_tensor, floating, init_parameters, rate, settings_text
from hookdrop.core.errors import InjectionError, ShapeError
from hookdrop.core.torch_internals import without_dispatch_modes


@dataclass(frozen=True)
class Rate:
    """The number that a schedule drives: its attribute, its range, and what it means.

    Example:
        >>> Rate("amount", low=-1.0, kind="factor").valid(-0.5, "Shrink")
        -0.5
    """

    attribute: str  #: The attribute of the regularizer, and the argument of its `__init__`.
    low: float = 0.0
    high: float = 1.0
    neutral: float = 0.0  #: The rate at which the regularizer is the identity.
    kind: Literal["drop", "noise", "factor"] = "drop"
    """`"drop"`: the expected fraction of dropped elements, so that 1 - rate is the fraction kept. `"noise"`: the
    strength of a change that drops nothing. `"factor"`: any other number."""
    open_end: bool = False  #: Whether the range excludes `high` itself.

    def __post_init__(self) -> None:
        if not self.low <= self.neutral <= self.high:
            raise ValueError(f"Rate({self.attribute!r}): neutral must lie in [low, high], got {self!r}.")

    def valid(self, value: object, owner: str) -> float:
        """Return `value` as a float, or raise a `ValueError` or `TypeError` that states the valid range."""
        if type(value) is float and -math.inf < self.low <= value < self.high:
            return value
        return rate(value, self.attribute, owner, self.high, low=self.low, open_end=self.open_end)

    def argument(
        self, value: float | Tensor, x: Tensor, owner: str, axes: str = "...", *, nested: bool = False
    ) -> float | Tensor:
        """`valid`, but a 0-d tensor in compiled code, which treats floats as constants. Also checks the tensor `x`."""
        if not is_compiling():
            value = self.valid(value, owner)
        elif not isinstance(value, Tensor):
            value = as_rate_tensor(self.valid(value, owner))
        floating(x, owner, nested=nested)
        if axes != "...":
            check_axes(x.shape, axes, owner)
        return value


SamplePlace = tuple[str | None, int, bool]
"""(module, axis, interleaved): the module whose first floating-point input, or else its first, has one row for each
sample; the axis of the samples in the regularized tensor; whether sample i of N has the rows i, i + N, ..., and not
consecutive ones. No module if the tensor has one row for each sample. A plain tuple, so that a text is a literal."""

FROM_AROUND = frozenset({"attention_mask", "samples"})
"""The needs of regularizers that modules around the layer have."""

P = Rate("p")
BELOW_1 = Rate("p", open_end=True)
LARGEST = torch.finfo(torch.float32).max  # noise of a larger strength is infinite in most models
STD = Rate("std", high=LARGEST, kind="noise")


def _regularize(self: Regularizer, x: Tensor, rate: Any, **context: Any) -> Tensor:
    """Regularize `x` at the given rate, in training and eval mode, without modifying `x` in place.

    Args:
        x: the tensor.
        rate: a float, or a 0-d float64 CPU tensor in compiled code, so that one graph serves all rates; None if the
            class has no rate.
        context: what the class `needs`.
    """
    raise NotImplementedError(f"{self.title} must define regularize(self, x, rate).")


class Regularizer(nn.Module, metaclass=NamedArguments):
    """A module that maps a tensor to a tensor. It regularizes in training mode and is the identity in eval mode.

    A subclass declares its `rate`, the number that a schedule drives (None if there is none), stores each argument of
    `__init__` in an attribute of the same name, and defines `regularize(x, rate)`. The plan and the first forward of a
    hook raise `ShapeError` for a tensor without its `axes`.

    Example:
        >>> class Shrink(Regularizer):
        ...     rate = Rate("amount", kind="factor")
        ...     def __init__(self, amount=0.1):
        ...         super().__init__()
        ...         self.amount = amount
        ...     def regularize(self, x, rate):
        ...         return x * (1 - rate)
        >>> Shrink(0.5)(torch.ones(2)), Shrink(0.5).eval()(torch.ones(2))
        (tensor([0.5000, 0.5000]), tensor([1., 1.]))
    """

    rate: ClassVar[Rate | None] = P  #: The number that a schedule drives, or None.

    needs: Sequence[str] = ()
    """What a hook passes to `regularize` by keyword, from the same call:

    * `"layer_input"`: the argument of the layer that the attribute `argument` names, if the class has one, or the only
      tensor among the arguments with the shape of the output (an error if several have it), or else the first;
    * `"attention_mask"`: that of the innermost module around the layer that takes one, or None;
    * `"start"`: the value that the parameter had at the injection, for `at="parameters"`;
    * `"samples"`: the `SampleRows` of the tensor, according to the attribute `samples`;
    * `"rows"`: the samples that a layer ran on, which `select_rows(x, p)` draws; `runs_on` says in a plan which it can.
    """

    samples: SamplePlace | None = None
    """Where the samples of the batch are in the tensor; None: each row of axis 0 is one."""

    only_at: str | None = None
    """`"output"`, `"input"`, `"parameters"` or the attention `"scores"` inside a layer, if it is only meaningful there;
    None if not. Fused attention shows a mask that is added to the scores instead of the scores."""
    in_backward: ClassVar[bool] = False  #: Whether it leaves the forward output unchanged, and only affects gradients.
    mixes_samples: ClassVar[bool] = False  #: Whether it changes nothing in a batch of one sample.
    axes: str = "..."  #: A name for each axis, such as `"N C H W"`; `"..."` stands for any number of axes.
    _adds_to_loss: ClassVar[bool] = False  # whether it is a penalty, with a method `penalize` for the loss term
    keeps_shape: bool = True  #: Whether the result has the shape of the input.

    regularize: Callable[..., Tensor] = _regularize

    def forward(self, x: Tensor, **context: Any) -> Tensor:
        """Regularize in training mode. Return `x` itself in eval mode and at the neutral rate."""
        rate, declared = rate_of(self), type(self).rate
        if not self.training or (declared is not None and rate == declared.neutral):
            return x
        return self.regularize(x, as_rate_tensor(rate) if rate is not None and is_compiling() else rate, **context)

    @property
    def graph_break(self) -> str:
        """The reason why it cannot be part of a compiled graph, with the fix; empty if it can."""
        return ""

    @property
    def independent_samples(self) -> int:
        """Whether each sample of a batch (axis 0) is regularized as if it were alone in the batch.

        A number n above 1 stands for fixed masks, one for each of n equal groups of consecutive rows: `predict` repeats
        its input n times. False is always correct. A class that overrides `regularize` defines it again, for example as
        `independent_samples = True`.
        """
        return False

    def for_layer(self, model: nn.Module, name: str, at: str = "output", survey: Any = None) -> Regularizer:
        """Return the regularizer for one layer of a model: this one, or one with settings that the model determines.

        Args:
            model: the model without wrappers.
            name: the full name of the layer.
            at: where it acts on the layer.
            survey: what running the model shows (`hookdrop.survey`); None without an example.

        Raises:
            LayerError: it does not support the layer.
        """
        return self

    def check(self, shape: Sequence[int]) -> None:
        """Raise `ShapeError` if it cannot regularize a tensor of this shape."""
        check_axes(shape, self.axes, self.title)

    def reading(self, shape: Sequence[int]) -> str:
        """Describe how it interprets the axes of a tensor of this shape, as in `"C=56 H=56 W=96"`."""
        named = [f"{axis}={size}" for axis, size in zip(self.axes.split(), shape, strict=False) if axis != "..."]
        return " ".join(named[1:] or named)

    def shape_warnings(self, shape: Sequence[int]) -> list[str]:
        """Return warnings about a shape that works but is probably not intended."""
        return nhwc_warnings(shape) if self.axes.startswith("N C") else []

    @property
    def title(self) -> str:
        """The name used in messages and tables."""
        return type(self).__name__

    @property
    def _given(self) -> Any:
        """What a text names: this regularizer, or the module or function of another library that it adapts."""
        return self

    def extra_repr(self) -> str:
        """The settings in the syntax of `parse`. Keyword-only settings are shown only if they are not the default."""
        return settings_text(self, lambda one: one.kind == one.KEYWORD_ONLY)


def rate_of(regularizer: Regularizer) -> float | None:
    """Return the current rate of a regularizer; None if it has none."""
    # Read from the class, because an instance may have an attribute `rate`.
    declared = type(regularizer).rate
    if declared is None:
        return None
    name = declared.attribute
    if not hasattr(regularizer, name):
        other = next((one for one in init_parameters(type(regularizer)) if "*" not in one), "strength")
        raise InjectionError(
            f"{regularizer.title} has no attribute {name!r}, the rate that it declares.\n"
            f"  in __init__: self.{name} = {name}   or in the class: rate = Rate({other!r}); None without a rate"
        )
    return float(getattr(regularizer, name))


def at_rate(regularizer: Regularizer, value: float | None) -> Regularizer:
    """Return a copy of a regularizer at another rate, or at the same rate if it has none."""
    twin, declared = copy.deepcopy(regularizer), type(regularizer).rate
    if declared is not None and value is not None:
        setattr(twin, declared.attribute, value)
    return twin


def drops_elements(regularizer: Regularizer) -> bool:
    """Whether elements that it drops no longer depend on the input, unlike those that noise changes."""
    declared = type(regularizer).rate
    return not regularizer.in_backward and (declared is None or declared.kind != "noise")


def rows_alone(regularizer: Regularizer) -> int:
    """Return `independent_samples`, or 0 if a subclass overrides `regularize` without defining it again."""
    nearest = next(cls for cls in type(regularizer).__mro__ if {"independent_samples", "regularize"} & {*vars(cls)})
    return int(regularizer.independent_samples) if "independent_samples" in vars(nearest) else 0


class DropRegularizer(Regularizer):
    """The base of those whose rate is a drop probability."""

    rate: ClassVar[Rate] = P

    def __init__(self, p: float | None = None, *, keep_prob: float | None = None) -> None:
        super().__init__()
        owner = self.title
        if p is not None and keep_prob is not None:
            both = f"(p={p}, keep_prob={keep_prob}); p = 1 - keep_prob"
            raise ValueError(f"{owner}: pass p or keep_prob, not both {both}.")
        if keep_prob is not None:
            # Rounded so that keep_prob=0.9 gives p=0.1 instead of 0.09999999999999998.
            p = round(1.0 - rate(keep_prob, "keep_prob", owner), 12)
        elif p is None:
            raise TypeError(f"{owner}: specify how much to drop: {owner}(p=0.1) or {owner}(keep_prob=0.9).")
        self.p = self.rate.valid(p, owner)


def check_axes(shape: Sequence[int], axes: str, owner: str) -> None:
    """Raise `ShapeError` unless `shape` has these axes, such as `"N C H W"` or `"N C ..."`."""
    names = axes.split()
    if len(shape) != len(names) and not ("..." in names and len(shape) >= len(names) - 1):
        use = _SUITED.get(len(shape), "use Dropout(p=...)")
        raise ShapeError(f"got {tuple(shape)}: {owner} needs ({', '.join(names)}).\n  {use}.")


_SUITED = {
    3: "for tokens (N, L, C) use TokenDropout(p=...), for a sequence (N, C, L) Dropout1d(p=...)",
    4: "for a map (N, C, H, W) use Dropout2d(p=...) or DropBlock(p=...)\n"
    "  for tokens (N, H, W, C), as in Swin, use Dropout(p=..., shared=(3,)), which drops whole tokens",
    5: "for a map (N, C, D, H, W) use Dropout3d(p=...) or DropBlock(p=...)",
}


def describe_map(shape: Sequence[int], channel: int = 1) -> str:
    """Return a text such as `C=256 H=14 W=14` for a tensor with its channels at axis `channel`."""
    spatial = {1: "L", 2: "HW", 3: "DHW"}.get(len(shape) - 2, "")
    sizes = [size for axis, size in enumerate(shape) if axis not in (0, channel)]
    return " ".join(f"{name}={size}" for name, size in zip(f"C{spatial}", [shape[channel], *sizes], strict=False))


def nhwc_warnings(shape: Sequence[int], fix: str = "hook a layer that returns NCHW.") -> list[str]:
    """Return a warning if the shape looks like (N, H, W, C) but would be interpreted as (N, C, H, W)."""
    if len(shape) == 4 and shape[1] == shape[2] != shape[3]:
        return [f"reads {tuple(shape)} as {describe_map(shape)}; that looks like NHWC: {fix}"]
    return []


# --- the rate that a hook passes to its regularizer


class CurrentRate:
    """An immutable rate of a call, as a float for eager code and as a tensor for compiled code."""

    def __init__(self, value: float | None, neutral: bool) -> None:
        self.value = value  # None if the regularizer has no rate
        self.neutral = neutral
        """Whether the regularizer is the identity at this rate. A bool, so that compiled code can branch on it."""
        # Compiled code takes the rate as a tensor, because floats become constants. Each rate is a new tensor, because
        # a graph whose backward is pending may hold the old one. It must be a real tensor even in fake-tensor mode.
        with torch.inference_mode(False), without_dispatch_modes():
            self.tensor = None if value is None else torch.tensor(value, dtype=torch.float64, device="cpu")


NO_RATE = CurrentRate(None, False)  # the regularizer is on, but takes no rate. (None means that it is off.)

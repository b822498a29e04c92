"""Penalties on activations: terms of the loss. The tensor itself stays unchanged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hookdrop.core.arguments import count, floating, rate
from hookdrop.core.errors import InjectionError, LayerError, ShapeError
from hookdrop.core.regularizer import LARGEST, Rate, Regularizer, rate_of
from hookdrop.core.selection import module_at

_SCALE = Rate("scale", high=LARGEST, kind="factor")


def activation_penalty(x: Tensor, l2: float = 2.0, slowness: float = 1.0, time_dim: int = 1) -> Tensor:
    """Return l2 * mean(x^2) + slowness * mean((x[t+1] - x[t])^2), a 0-d tensor: see `ActivationPenalty`.

    It is computed in at least float32. A mean over nothing is 0: for an empty batch, or a single time step.
    """
    l2, slowness, time_dim = _coefficients(l2, slowness, time_dim, "activation_penalty")
    floating(x, "activation_penalty")
    # A copy, because later layers may modify `x` in place.
    wide = x.to(torch.promote_types(x.dtype, torch.float32), copy=True)
    terms = [l2 * _mean_square(wide)] if l2 else []
    if slowness:
        axis = _time_axis(x.shape, time_dim)
        terms.append(slowness * _mean_square(wide.diff(dim=axis)))
    return sum(terms[1:], start=terms[0])


def _mean_square(x: Tensor) -> Tensor:
    return x.square().sum() / max(x.numel(), 1)


def _coefficients(l2: object, slowness: object, time_dim: object, owner: str) -> tuple[float, float, int]:
    weights = [rate(value, name, owner, LARGEST) for name, value in (("l2", l2), ("slowness", slowness))]
    if weights == [0.0, 0.0]:
        raise ValueError(f"{owner}: l2 and slowness are both 0, so there is nothing to add.\n  remove it, or set one.")
    return weights[0], weights[1], count(time_dim, "time_dim", owner, -8)


def _time_axis(shape: Sequence[int], time_dim: int) -> int:
    if len(shape) < 3 or not -len(shape) <= time_dim < len(shape):
        raise ShapeError(
            f"got {tuple(shape)}: slowness compares the time steps of (N, T, C, ...), at time_dim={time_dim}.\n"
            "  for a tensor without time steps: ActivationPenalty(l2=..., slowness=0)"
        )
    return time_dim % len(shape)


def _penalize(self: Penalty, x: Tensor, rate: Any, **context: Any) -> Tensor:
    """Return the loss term of one call at the given rate, a 0-d tensor.

    Args:
        x: the tensor of the site. Later layers may modify it in place, so save a copy of it for the backward pass.
        rate: a float, or a 0-d float64 CPU tensor in compiled code, so that one graph serves all rates; None if the
            class has no rate.
        context: what the class `needs`.
    """
    raise NotImplementedError(f"{self.title} must define penalize(self, x, rate).")


class Penalty(Regularizer):
    """A regularizer that returns its tensor unchanged and adds a term to the loss, which `Injection.penalty` reads.

    A subclass declares its `rate`, stores each argument of `__init__` in an attribute of the same name, and defines
    `penalize(x, rate)`. Hooks call it in training mode with gradients. A plain layer cannot add to the loss, so calling
    one in training mode is an `InjectionError`.

    Example:
        >>> class Sparsity(Penalty):
        ...     rate = Rate("l1", high=1e6, kind="factor")
        ...     def __init__(self, l1=0.01):
        ...         super().__init__()
        ...         self.l1 = l1
        ...     def penalize(self, x, rate):
        ...         return rate * x.abs().mean()
        >>> Sparsity().penalize(torch.tensor([[1.0, -3.0]]), rate=0.5)
        tensor(1.)
    """

    in_backward: ClassVar[bool] = True
    _adds_to_loss = True
    penalize: Callable[..., Tensor] = _penalize

    def regularize(self, x: Tensor, rate: Any, **context: Any) -> Tensor:
        return x

    def forward(self, x: Tensor, **context: Any) -> Tensor:
        declared = type(self).rate
        if self.training and (declared is None or rate_of(self) != declared.neutral):
            raise InjectionError(
                f"{self.title} adds a term to the loss, which a plain layer cannot do.\n"
                f"  inject(model, {self.title}(...), layers=...), then: loss = criterion(...) + drop.penalty()"
            )
        return x


class ActivationPenalty(Penalty):
    """Add l2 * mean(h^2) + slowness * mean((h[t+1] - h[t])^2) to the loss, for the activation h of the layer.

    The two are activation regularization (AR) and temporal activation regularization (TAR): activations stay small, and
    change slowly over time. `drop.penalty()` returns the sum over the sites and calls since it was last read, and
    `loss = criterion(...) + drop.penalty()` adds it. A schedule drives `scale`, which multiplies both terms.

    Args:
        l2: the coefficient of AR, at least 0.
        slowness: the coefficient of TAR, at least 0; 0 for tensors without time steps.
        time_dim: the time axis: 1 for (N, T, C), 0 for (T, N, C), which `nn.LSTM` returns without `batch_first`.
        scale: the factor of both terms, at least 0.

    Shape: (N, T, C), or any shape with at least three axes; with `slowness=0`, any. Padding counts as activations.

    Raises:
        LayerError: in `inject`, if the layer is an `nn.RNN`, `nn.LSTM` or `nn.GRU` with another time axis.

    Example:
        >>> model = nn.Sequential(nn.Identity())
        >>> drop = inject(model, ActivationPenalty(l2=2.0, slowness=1.0), layers="0")
        >>> _ = model(torch.tensor([[[1.0], [2.0], [4.0]]]))
        >>> drop.penalty()  # 2 * (1 + 4 + 16) / 3 + (1 + 4) / 2
        tensor(16.5000)

    Reference: Merity et al. 2017, "Revisiting activation regularization for language RNNs", arXiv:1708.01009.
    """

    rate: ClassVar[Rate | None] = _SCALE

    def __init__(self, l2: float = 2.0, slowness: float = 1.0, time_dim: int = 1, *, scale: float = 1.0) -> None:
        super().__init__()
        self.l2, self.slowness, self.time_dim = _coefficients(l2, slowness, time_dim, self.title)
        self.scale = _SCALE.valid(scale, self.title)
        self.axes = "N T C ..." if self.slowness else "..."

    def for_layer(self, model: nn.Module, name: str, at: str = "output", survey: Any = None) -> ActivationPenalty:
        layer = module_at(model, name)
        if not (self.slowness and isinstance(layer, nn.RNNBase)):
            return self
        time_dim = int(layer.batch_first)
        if self.time_dim not in (time_dim, time_dim - 3):
            order = "(N, T, C)" if time_dim else "(T, N, C)"
            raise LayerError(
                f"ActivationPenalty at {name!r}: this {type(layer).__name__} has batch_first={layer.batch_first}, so "
                f"its tensors are {order}, and time_dim={self.time_dim} compares samples with one another.\n"
                f"  write time_dim={time_dim}"
            )
        return self

    def check(self, shape: Sequence[int]) -> None:
        if self.slowness:
            _time_axis(shape, self.time_dim)

    def reading(self, shape: Sequence[int]) -> str:
        return f"T={shape[_time_axis(shape, self.time_dim)]}" if self.slowness else ""

    def shape_warnings(self, shape: Sequence[int]) -> list[str]:
        if not self.slowness:
            return []
        if _time_axis(shape, self.time_dim) == len(shape) - 1:
            return [f"reads the last axis of {tuple(shape)} as time; features are usually last."]
        if len(shape) == 4:
            return [f"reads {tuple(shape)} as {self.reading(shape)}; for a map use ActivationPenalty(slowness=0)."]
        return []

    def penalize(self, x: Tensor, rate: Any) -> Tensor:
        term = activation_penalty(x, self.l2, self.slowness, self.time_dim)
        scaled: Tensor = term * rate
        return scaled.to(term.dtype)  # the product with a float64 tensor has its dtype

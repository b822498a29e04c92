"""Statistics of one layer's output and of its gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hookdrop.errors import ShapeError
from hookdrop.hooks.checkpointing import is_recomputing
from hookdrop.injection.select import Layer
from hookdrop.observe.read_only_hooks import LayerObserver, first_tensor
from hookdrop.utils.axes import channel_axis, channel_axis_of

MARGIN = 0.05
"""An output is saturated within this fraction of the range from an end of it."""


class Moments:
    """Mean and variance of all elements of the tensors added, in float64 (float32 on MPS). No tensor is kept.

    Reference: Chan, Golub, LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample variances".
    """

    def __init__(self) -> None:
        self.count, self.parts = 0, 0
        """Elements and tensors."""
        self._mean: Tensor | float = 0.0
        self._deviations: Tensor | float = 0.0
        """The sum of squared deviations from the mean. Both stay on the device: to read them would synchronize."""

    @torch.no_grad()
    def add(self, x: Tensor) -> None:
        """Add the elements of `x`; of a DTensor those of this rank."""
        x = _local(x.detach())
        if not x.numel():
            return
        x = x.to(torch.float32 if x.device.type == "mps" else torch.float64)
        var, mean = torch.var_mean(x, correction=0)
        new, total = x.numel(), self.count + x.numel()
        shift = mean - self._mean
        self._mean = self._mean + shift * (new / total)
        self._deviations = self._deviations + var * new + shift * shift * (self.count * new / total)
        self.count, self.parts = total, self.parts + 1

    @property
    def mean(self) -> float:
        """NaN without elements."""
        return float(self._mean) if self.count else math.nan

    @property
    def variance(self) -> float:
        """Divided by the count, as `torch.var(correction=0)`; NaN without elements."""
        return float(self._deviations) / self.count if self.count else math.nan

    @property
    def rms(self) -> float:
        """The root of the mean square."""
        return math.sqrt(self.variance + self.mean**2)

    @property
    def norm(self) -> float:
        """The L2 norm of a tensor: the root of the mean over the tensors of its square."""
        return self.rms * math.sqrt(self.count / self.parts) if self.parts else math.nan


class ChannelAxes:
    """The channel axes of the layers of one model."""

    def __init__(self, channel_dim: int | None) -> None:
        self._channel_dim = channel_dim
        self._last: dict[tuple[int, ...], int] = {}
        """The channel axis in the last layer whose class defines it, by the shape of its output."""

    def hooks(self, model: nn.Module) -> list[tuple[nn.Module, Any]]:
        """The hooks of the layers whose class defines the axis."""
        if self._channel_dim is not None:
            return []
        return [(module, self._note) for module in model.modules() if channel_axis_of(module, (1, 1, 1, 1)) is not None]

    def _note(self, module: nn.Module, args: Any, output: Any) -> None:
        x = first_tensor(output)
        if x is not None and x.dim() > 1 and (axis := channel_axis_of(module, x.shape)) is not None:
            self._last[tuple(x.shape)] = axis

    def of(self, name: str, module: nn.Module, shape: Sequence[int]) -> int:
        """The channel axis of an output with two axes or more."""
        if self._channel_dim is None:
            own = channel_axis_of(module, shape)
            return self._last.get(tuple(shape), channel_axis(shape)) if own is None else own
        if not -len(shape) <= self._channel_dim < len(shape):
            raise ShapeError(
                f"{name!r} returned {tuple(shape)}: channel_dim={self._channel_dim} is not one of its axes 0 to "
                f"{len(shape) - 1}.\n  leave out channel_dim, or skip this layer: stats(..., exclude={name!r})"
            )
        return self._channel_dim


class LayerStats(LayerObserver):
    """Statistics of one layer."""

    def __init__(self, layer: Layer, axes: ChannelAxes, called: list[LayerStats]) -> None:
        super().__init__(layer)
        self.kind, self.calls = type(layer.module).__name__, 0
        self.activation, self.gradient = Moments(), Moments()
        self._axes, self._called = axes, called
        self._alive: Tensor | None = None
        """bool, for each channel: whether it was ever not 0."""
        self._ragged = False
        """Whether the number of channels differs between calls."""
        self._bounds = _bounds(layer.module)
        self._saturated: Tensor | int = 0

    def __repr__(self) -> str:
        gradient = f", gradient norm {self.gradient_norm:.3g}" if self.gradient.count else ""
        return (
            f"<LayerStats {self.name or 'the model'} ({self.kind}): {self.calls} calls, mean {self.mean:.3g}, "
            f"variance {self.variance:.3g}{gradient}>"
        )

    @property
    def mean(self) -> float:
        """Of the output's elements, over all calls."""
        return self.activation.mean

    @property
    def variance(self) -> float:
        """Of the output's elements, divided by their count."""
        return self.activation.variance

    @property
    def gradient_mean(self) -> float:
        """Of the elements of the output's gradient; NaN without a backward pass."""
        return self.gradient.mean

    @property
    def gradient_variance(self) -> float:
        """Of the elements of the output's gradient."""
        return self.gradient.variance

    @property
    def gradient_norm(self) -> float:
        """L2 norm of the gradient of a call's output: the root of the mean of the squares over the calls."""
        return self.gradient.norm

    @property
    def dead(self) -> float | None:
        """The fraction of channels (units of features) that were exactly 0 in every element of every call.

        None if the output has no channels, or not always the same number.
        """
        return None if self._alive is None or self._ragged else float((~self._alive).double().mean())

    @property
    def saturated(self) -> float | None:
        """The fraction of output elements within 5 % of the range from an end of it.

        Of Sigmoid and Hardsigmoid below .05 or above .95, of Tanh and Softsign beyond +-.9, of Hardtanh likewise, of
        ReLU6 above 5.7; None for all other layers.
        """
        count = self.activation.count
        return float(self._saturated) / count if self._bounds is not None and count else None

    def look(self, module: nn.Module, args: Any, output: Any) -> None:
        """Add one call; from a call that an activation checkpoint recomputes, only its gradient."""
        x = first_tensor(output)
        if x is None or not x.is_floating_point():
            return
        if not is_recomputing():
            if not self.calls:
                self._called.append(self)
            self.calls += 1
            self._add_output(_local(x.detach()))
        if x.requires_grad:
            self.on_gradient(x, self.gradient.add)

    def _add_output(self, x: Tensor) -> None:
        self.activation.add(x)
        if self._bounds is not None:
            low, high = self._bounds
            self._saturated = self._saturated + ((x <= low) | (x >= high)).sum()
        if x.dim() < 2 or not x.numel():
            return
        axis = self._axes.of(self.name, self.module, x.shape)
        alive = (x != 0).movedim(axis, 0).flatten(1).any(1)
        if self._alive is None:
            self._alive = alive
        elif self._alive.shape == alive.shape:
            self._alive = self._alive | alive
        else:
            self._ragged = True


def _local(x: Tensor) -> Tensor:
    return x.to_local() if hasattr(x, "to_local") else x


def _bounds(module: nn.Module) -> tuple[float, float] | None:
    """An output is saturated at or below the first, and at or above the second."""
    match module:
        case nn.ReLU6():  # `dead` covers its lower end
            low, high = -math.inf, 6.0
        case nn.Sigmoid() | nn.Hardsigmoid():
            low, high = 0.0, 1.0
        case nn.Tanh() | nn.Softsign():
            low, high = -1.0, 1.0
        case nn.Hardtanh():
            low, high = float(module.min_val), float(module.max_val)
        case _:
            return None
    margin = MARGIN * (high - (low if math.isfinite(low) else 0.0))
    return low + margin, high - margin

"""Statistics of one layer's output and of its gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hookdrop.errors import ShapeError
from hookdrop.hooks.checkpointing import is_recomputing
from hookdrop.observe.read_only_hooks import LayerObserver, first_tensor
from hookdrop.utils.axes import channel_axis, channel_axis_of
from hookdrop.utils.select import Layer

MARGIN = 0.05
"""An output is saturated if it is within this fraction of the output range from a bound."""


class Moments:
    """Running mean and variance of the elements of all added tensors, in float64 (float32 on MPS). Stores no tensor.

    Reference: Chan, Golub, LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample variances".
    """

    def __init__(self) -> None:
        self.count, self.parts = 0, 0
        """Number of elements and of tensors."""
        self._mean: Tensor | float = 0.0
        self._deviations: Tensor | float = 0.0
        """Sum of squared deviations from the mean. Both stay on the device, because reading them would synchronize."""

    @torch.no_grad()
    def add(self, x: Tensor) -> None:
        """Add the elements of `x`; for a DTensor, those of this rank."""
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
        """Mean of the elements; NaN without elements."""
        return float(self._mean) if self.count else math.nan

    @property
    def variance(self) -> float:
        """Variance of the elements, as `torch.var(correction=0)`; NaN without elements."""
        return float(self._deviations) / self.count if self.count else math.nan

    @property
    def rms(self) -> float:
        """Root mean square of the elements."""
        return math.sqrt(self.variance + self.mean**2)

    @property
    def norm(self) -> float:
        """L2 norm of a tensor: root mean square over the tensors."""
        return self.rms * math.sqrt(self.count / self.parts) if self.parts else math.nan


class ChannelAxes:
    """The channel axes of the layers of one model."""

    def __init__(self, channel_dim: int | None) -> None:
        self._channel_dim = channel_dim
        self._last: dict[tuple[int, ...], int] = {}
        """Channel axis of the most recent layer whose class defines it, by the shape of its output."""

    def hooks(self, model: nn.Module) -> list[tuple[nn.Module, Any]]:
        """Return the hooks for the layers whose class defines the channel axis."""
        if self._channel_dim is not None:
            return []
        modules = [module for module in model.modules() if channel_axis_of(module, (1, 1, 1, 1)) is not None]
        return [(module, self._record_axis) for module in modules]

    def _record_axis(self, module: nn.Module, args: Any, output: Any) -> None:
        x = first_tensor(output)
        if x is not None and x.dim() > 1 and (axis := channel_axis_of(module, x.shape)) is not None:
            self._last[tuple(x.shape)] = axis

    def of(self, name: str, module: nn.Module, shape: Sequence[int]) -> int:
        """Return the channel axis of an output with at least two axes."""
        if self._channel_dim is None:
            own = channel_axis_of(module, shape)
            return self._last.get(tuple(shape), channel_axis(shape)) if own is None else own
        if not -len(shape) <= self._channel_dim < len(shape):
            raise ShapeError(
                f"{name!r} returned {tuple(shape)}: channel_dim={self._channel_dim} is not one of its axes 0 to "
                f"{len(shape) - 1}.\n  omit channel_dim, or skip this layer: stats(..., exclude={name!r})"
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
        """bool, one element for each channel: whether it was ever nonzero."""
        self._channels_vary = False
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
        """Mean of the output's elements over all calls."""
        return self.activation.mean

    @property
    def variance(self) -> float:
        """Variance of the output's elements, as `torch.var(correction=0)`."""
        return self.activation.variance

    @property
    def gradient_mean(self) -> float:
        """Mean of the elements of the output's gradient; NaN without a backward pass."""
        return self.gradient.mean

    @property
    def gradient_variance(self) -> float:
        """Variance of the elements of the output's gradient."""
        return self.gradient.variance

    @property
    def gradient_norm(self) -> float:
        """L2 norm of the gradient of a call's output: root mean square over the calls."""
        return self.gradient.norm

    @property
    def dead(self) -> float | None:
        """Fraction of channels (or feature units) that were exactly 0 in every element of every call.

        None if the output has no channels, or if their number differs between calls.
        """
        return None if self._alive is None or self._channels_vary else float((~self._alive).double().mean())

    @property
    def saturated(self) -> float | None:
        """Fraction of output elements within 5% of the output range from a bound.

        Sigmoid and Hardsigmoid: below 0.05 or above 0.95. Tanh and Softsign: beyond +-0.9. Hardtanh: within 5% of its
        range from its bounds. ReLU6: above 5.7. None for all other layers.
        """
        count = self.activation.count
        return float(self._saturated) / count if self._bounds is not None and count else None

    def look(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook: add one call. From a recomputed forward of a checkpoint, add only the gradient."""
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
            self._channels_vary = True


def _local(x: Tensor) -> Tensor:
    return x.to_local() if hasattr(x, "to_local") else x


def _bounds(module: nn.Module) -> tuple[float, float] | None:
    """Return the bounds: an output is saturated at or below the first, or at or above the second."""
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

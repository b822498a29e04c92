"""Numbers of one layer's output and of its gradient."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hookdrop.hooks.checkpointing import running_again
from hookdrop.injection.select import Layer
from hookdrop.observe.axes import Axes
from hookdrop.observe.moments import Moments
from hookdrop.observe.read_only_hooks import first_tensor

_ENDS: tuple[tuple[type[nn.Module], float | None, float | None], ...] = (
    (nn.ReLU6, None, 6.0),  # its 0 is what `dead` is about
    (nn.Sigmoid, 0.0, 1.0),
    (nn.Hardsigmoid, 0.0, 1.0),
    (nn.Tanh, -1.0, 1.0),
    (nn.Softsign, -1.0, 1.0),
)
NEAR = 0.05
"""An output is saturated within this part of the range from an end of it."""


class LayerStats:
    """Numbers of one layer."""

    def __init__(self, layer: Layer, axes: Axes, called: list[LayerStats]) -> None:
        self.name, self.module, self.kind = layer.name, layer.module, type(layer.module).__name__
        self.names = {layer.name, *layer.aliases, *layer.spellings}
        self.calls = 0
        self._called = called
        """The layers that were called, in the order of their first calls."""
        self.activation, self.gradient = Moments(), Moments()
        self._axes = axes
        self._alive: Tensor | None = None
        """bool, for each channel: whether it was ever not 0."""
        self._ragged = False
        """Whether the number of channels was another in another call."""
        self._ends = _ends(layer.module)
        self._saturated: Tensor | int = 0
        self._handles: list[RemovableHandle] = []

    def __repr__(self) -> str:
        gradient = f", gradient norm {self.gradient_norm:.3g}" if self.gradient.count else ""
        return (
            f"<LayerStats {self.name or 'the model'} ({self.kind}): {self.calls} calls, mean {self.mean:.3g}, "
            f"variance {self.variance:.3g}{gradient}>"
        )

    # --- what it says

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
        """Of the elements of the gradient of the output; nan without a backward pass."""
        return self.gradient.mean

    @property
    def gradient_variance(self) -> float:
        """Of the elements of the gradient of the output."""
        return self.gradient.variance

    @property
    def gradient_norm(self) -> float:
        """L2 norm of the gradient of a call's output: the root of the mean of the squares, over the calls."""
        return self.gradient.norm

    @property
    def dead(self) -> float | None:
        """The fraction of channels (units of features) that were exactly 0 in every element of every call.

        None where there are no channels, or not always as many.
        """
        return None if self._alive is None or self._ragged else float((~self._alive).double().mean())

    @property
    def saturated(self) -> float | None:
        """The fraction of output elements within 5 % of the range from an end of it.

        Of Sigmoid and Hardsigmoid below .05 or above .95, of Tanh and Softsign beyond +-.9, of Hardtanh likewise, of
        ReLU6 above 5.7; None for all other layers.
        """
        count = self.activation.count
        return float(self._saturated) / count if self._ends is not None and count else None

    # --- how it comes to know

    def look(self, module: nn.Module, args: Any, output: Any) -> None:
        """Take in one call; what an activation checkpoint runs again only for its gradient."""
        x = first_tensor(output)
        if x is None or not x.is_floating_point():
            return
        if not running_again():
            if not self.calls:
                self._called.append(self)
            self.calls += 1
            self._look_at(x.detach())
        if x.requires_grad:
            self._handles = [handle for handle in self._handles if handle.hooks_dict_ref() is not None]
            self._handles.append(x.register_hook(self._add_gradient))  # type: ignore[no-untyped-call]

    def _look_at(self, x: Tensor) -> None:
        x = x.to_local() if hasattr(x, "to_local") else x
        self.activation.add(x)
        if self._ends is not None:
            low, high = self._ends
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

    def _add_gradient(self, gradient: Tensor) -> None:
        self.gradient.add(gradient)

    def let_go(self) -> None:
        """Leave no hook on any tensor."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _ends(module: nn.Module) -> tuple[float, float] | None:
    """From where on down, and from where on up, an output is saturated."""
    found = next(((low, high) for cls, low, high in _ENDS if isinstance(module, cls)), None)
    if found is None and isinstance(module, nn.Hardtanh):
        found = float(module.min_val), float(module.max_val)
    if found is None:
        return None
    low, high = found
    assert high is not None
    margin = NEAR * (high - (low or 0.0))
    return -math.inf if low is None else low + margin, high - margin

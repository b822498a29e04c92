"""Where the channels of a layer's output are: as its class says, or the layer before it, or the shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from hookdrop.errors import ShapeError
from hookdrop.observe.read_only_hooks import first_tensor
from hookdrop.utils.axes import channel_axis

_BATCHED = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm)
_LAST = (nn.Linear, nn.LayerNorm)
_SAYS = (nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, *_BATCHED, *_LAST)


class Axes:
    """The axes of the channels, of the layers of one model in one `stats`."""

    def __init__(self, channel_dim: int | None) -> None:
        self._channel_dim = channel_dim
        self._last: dict[tuple[int, ...], int] = {}
        """By the shape of an output: where its channels were, in the last layer that says it."""

    def noting(self, model: nn.Module) -> list[tuple[nn.Module, Any]]:
        """What to call after the forwards of the layers whose class says it."""
        if self._channel_dim is not None:
            return []
        return [(module, self._note) for module in model.modules() if isinstance(module, _SAYS)]

    def _note(self, module: nn.Module, args: Any, output: Any) -> None:
        x = first_tensor(output)
        if x is not None and x.dim() > 1 and (axis := own_axis(module, x.shape)) is not None:
            self._last[tuple(x.shape)] = axis

    def of(self, name: str, module: nn.Module, shape: Sequence[int]) -> int:
        """The axis in an output of two axes or more.

        Raises:
            ShapeError: `channel_dim` is none of its axes.
        """
        if self._channel_dim is None:
            own = own_axis(module, shape)
            return self._last.get(tuple(shape), channel_axis(shape)) if own is None else own
        if not -len(shape) <= self._channel_dim < len(shape):
            raise ShapeError(
                f"{name!r} gave {tuple(shape)}: channel_dim={self._channel_dim} is not one of its axes 0 to "
                f"{len(shape) - 1}.\n  leave out channel_dim, or this layer: stats(..., exclude={name!r})"
            )
        return self._channel_dim


def own_axis(module: nn.Module, shape: Sequence[int]) -> int | None:
    """The axis of the channels where a layer's class says it.

    Example:
        >>> own_axis(nn.Conv2d(3, 8, 1), (8, 14, 14)), own_axis(nn.Linear(3, 8), (5, 7, 8)), own_axis(nn.ReLU(), (5, 8))
        (0, 2, None)
    """
    axes = len(shape)
    if isinstance(module, nn.modules.conv._ConvNd):
        return axes - len(module.kernel_size) - 1
    if isinstance(module, nn.modules.instancenorm._InstanceNorm):
        return 0 if axes == module._get_no_batch_dim() else 1  # type: ignore[no-untyped-call]
    if isinstance(module, _BATCHED):
        return 1
    if isinstance(module, nn.LayerNorm) and axes == 4 and shape[-1] != module.normalized_shape[-1]:
        return 1  # as those of ConvNeXt, which turn the map round, and back
    return axes - 1 if isinstance(module, _LAST) else None

"""Read the batches that a model predicts: a batch, or a loader of batches."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from hookdrop.utils.names import unwrapped

Device: TypeAlias = int | str | torch.device | None


@dataclass(frozen=True)
class Inputs:
    """The arguments of one call of the model."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def map(self, change: Callable[[Any], Any]) -> Inputs:
        """Apply `change` to each argument."""
        return Inputs(tuple(map(change, self.args)), {name: change(value) for name, value in self.kwargs.items()})

    @property
    def tensors(self) -> list[Tensor]:
        """The arguments that are tensors."""
        return [value for value in self._values if isinstance(value, Tensor)]

    @property
    def _values(self) -> list[Any]:
        return [*self.args, *self.kwargs.values()]

    @property
    def size(self) -> int | None:
        """The number of rows that all tensors have, or None if the arguments cannot be repeated row by row."""
        if not all(value is None or isinstance(value, Tensor | bool | int | float | str) for value in self._values):
            return None
        if any(x.dim() == 0 or x.is_nested or x.layout != torch.strided for x in self.tensors):
            return None
        sizes = {x.shape[0] for x in self.tensors}
        return sizes.pop() if len(sizes) == 1 else None

    def of_tensors(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """Apply `change` to each tensor."""
        return self.map(lambda value: change(value) if isinstance(value, Tensor) else value)

    def repeated(self, times: int) -> Inputs:
        """All rows, then all rows again, and so on: (times * N, ...)."""
        return self if times == 1 else self.of_tensors(lambda x: torch.cat([x] * times))


def is_batch(data: Any) -> bool:
    """Whether `data` is one batch; otherwise it is a loader."""
    return isinstance(data, Tensor | tuple | Mapping)


def read_batches(model: nn.Module, data: Any, device: Device) -> tuple[Iterator[Inputs], int | None]:
    """Return the inputs of each batch on the device, that of the model if None, and the number of batches if known."""
    if device is None:
        device = next((weight.device for weight in model.parameters() if weight.device.type != "meta"), None)
    if is_batch(data):
        arguments = data if isinstance(data, tuple | Mapping) else (data,)
        read: Iterable[Inputs] = [_arguments(model, arguments)]
        length: int | None = 1
    else:
        if isinstance(data, str | bytes) or not isinstance(data, Iterable) or hasattr(data, "__array__"):
            raise TypeError(
                f"predict: expected a tensor, a tuple of arguments, a mapping of keyword arguments or a loader, got "
                f"{type(data).__name__}.\n  an array: torch.as_tensor(x)   one argument of another type: (x,)"
            )
        read = (_arguments(model, _input_of(batch)) for batch in data)
        try:
            length = len(cast(Sized, data))
        except TypeError:
            length = None
    moved = (inputs.map(lambda value: value.to(device) if hasattr(value, "to") else value) for inputs in read)
    return moved if device is not None else iter(read), length


def _input_of(batch: Any) -> tuple[Any, ...] | Mapping[str, Any]:
    """Return the input of a loader's batch: the batch, or its first element."""
    if isinstance(batch, list | tuple):
        if not batch:
            raise ValueError("predict: the loader yields an empty batch, which has no input.")
        batch = batch[0]
    return batch if isinstance(batch, Mapping) else (batch,)


def _arguments(model: nn.Module, arguments: tuple[Any, ...] | Mapping[str, Any]) -> Inputs:
    if isinstance(arguments, tuple):
        return Inputs(arguments, {})
    accepted = inspect.signature(unwrapped(model).forward).parameters
    unused = [name for name in ("labels", "label") if name not in accepted]
    return Inputs((), {name: value for name, value in arguments.items() if name not in unused})

"""Monte Carlo prediction: sample a model with its hooks active, and summarize the samples."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from hookdrop.hooks.hook import SiteHook
from hookdrop.hooks.registry import hooks_of
from hookdrop.injection.uncertainty import Prediction, Summary, concatenated
from hookdrop.regularizers import rows_alone
from hookdrop.survey.isolation import eval_mode, forked_rng, uncompiled
from hookdrop.utils.errors import InjectionError, ShapeError, warn
from hookdrop.utils.names import unwrapped
from hookdrop.utils.tensor_tree import describe
from hookdrop.utils.validation import count, one_of

_ROWS = 256
_VALUES_ON_CPU = 2**18
"""The largest input of a repeated batch on a CPU. Above it, forwards of larger batches are not faster per row."""

_EQUAL = 1e-6
"""Up to this standard deviation, relative to the largest mean, samples differ by rounding only."""

_TOLERANCE, _TOLERANCE_16_BIT = 5e-3, 5e-2
"""The largest difference between outputs of one row in two batches, relative to the largest output."""


# --- batches


@dataclass(frozen=True)
class Inputs:
    """The arguments of one call of the model."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def values(self) -> list[Any]:
        return [*self.args, *self.kwargs.values()]

    @property
    def tensors(self) -> list[Tensor]:
        return [value for value in self.values if isinstance(value, Tensor)]

    @property
    def size(self) -> int | None:
        """The number of rows that all tensors have, or None if the arguments cannot be repeated row by row."""
        if not all(value is None or isinstance(value, Tensor | bool | int | float | str) for value in self.values):
            return None
        if any(x.dim() == 0 or x.is_nested or x.layout != torch.strided for x in self.tensors):
            return None
        sizes = {x.shape[0] for x in self.tensors}
        return sizes.pop() if len(sizes) == 1 else None

    def map(self, change: Callable[[Any], Any]) -> Inputs:
        """Apply `change` to each argument."""
        return Inputs(tuple(map(change, self.args)), {name: change(value) for name, value in self.kwargs.items()})

    def with_rows(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """Apply `change` to each tensor."""
        return self.map(lambda value: change(value) if isinstance(value, Tensor) else value)

    def repeated(self, times: int) -> Inputs:
        """All rows, then all rows again, and so on: (times * N, ...)."""
        return self if times == 1 else self.with_rows(lambda x: torch.cat([x] * times))


def _read_batches(model: nn.Module, data: Any) -> Iterator[Inputs]:
    """Yield the inputs of each batch, on the device of the model."""
    device = next((weight.device for weight in model.parameters() if weight.device.type != "meta"), None)
    if isinstance(data, Tensor | tuple | Mapping):
        data = [Inputs(data, {}) if isinstance(data, tuple) else data]
    elif isinstance(data, str | bytes) or not isinstance(data, Iterable) or hasattr(data, "__array__"):
        raise TypeError(
            f"predict: expected a tensor, a tuple of arguments, a mapping of keyword arguments or a loader, got "
            f"{type(data).__name__}.\n  an array: torch.as_tensor(x)   one argument of another type: (x,)"
        )
    accepted = inspect.signature(unwrapped(model).forward).parameters
    for batch in data:
        if isinstance(batch, list | tuple):
            batch = batch[0]
        if isinstance(batch, Mapping):
            unused = [name for name in ("labels", "label") if name not in accepted]
            batch = Inputs((), {name: value for name, value in batch.items() if name not in unused})
        inputs = batch if isinstance(batch, Inputs) else Inputs((batch,), {})
        yield inputs.map(lambda x: x.to(device) if device is not None and hasattr(x, "to") else x)


# --- sampling


def predict(
    model: nn.Module,
    hooks: Sequence[SiteHook],
    sampling: Callable[[], AbstractContextManager[object]],
    data: Any,
    settings: Settings,
) -> Prediction:
    """Sample `model` on `data` inside `sampling()`, which activates `hooks`."""
    with sampling():
        pass  # raise its errors before the first batch is read
    batches = _read_batches(model, data)
    found: list[Prediction] = []
    with eval_mode(model), torch.no_grad():
        first = next(batches, None)
        if first is None:
            raise ValueError(
                f"predict: the {type(data).__name__} yields no batch.\n"
                "  a generator can be read only once: pass a DataLoader or a list"
            )
        sharing = _Sharing(model, hooks, first, settings)
        with sampling():
            for inputs in chain([first], batches):
                summary, size = Summary(settings.activation), sharing.samples_per_forward(inputs)
                for start in range(0, settings.samples, size):
                    times = min(size, settings.samples - start)
                    summary.add(settings.call(model, inputs.repeated(times)), times)
                found.append(summary.prediction())
    prediction = concatenated(found)
    if prediction.mean.numel() and prediction.variance.max().sqrt() <= _EQUAL * prediction.mean.abs().max():
        warn(
            f"predict: all {settings.samples} samples are equal up to rounding: no hook changed the output, or the "
            "activation saturates.\n  check that the hooked layers run: print(drop.probe(x))"
        )
    return prediction


@dataclass(frozen=True)
class Settings:
    """Arguments of `Injection.predict`, validated."""

    samples: int
    activation: str | None
    output: Callable[[Any], Tensor] | None
    rows: int | None

    def __post_init__(self) -> None:
        if count(self.samples, "samples", "predict") == 1:
            raise ValueError(
                "predict: samples must be at least 2, got 1: one sample has no variance.\n"
                "  one sample: with drop.sampling(), torch.no_grad(): model(x)"
            )
        one_of(self.activation, "activation", "predict", ("softmax", "sigmoid", None))
        if self.rows is not None:
            count(self.rows, "rows", "predict")

    def call(self, model: nn.Module, inputs: Inputs) -> Tensor:
        """Call the model and return the tensor to summarize."""
        out = model(*inputs.args, **inputs.kwargs)
        picked: object = out if isinstance(out, Tensor) else getattr(out, "logits", None)
        if self.output is not None:
            picked = self.output(out)
        pick = "\n  pass a function that picks the tensor: output=lambda out: out[...]"
        if not isinstance(picked, Tensor):
            what = "the model returns" if self.output is None else "no tensor was picked from"
            raise TypeError(f"predict: {what} {describe(out)}.{pick}")
        if not picked.is_floating_point() or picked.dim() == 0:
            raise ShapeError(
                "predict: the output must be a floating-point tensor with one row per input, got "
                f"{tuple(picked.shape)} {picked.dtype}.{pick}"
            )
        return picked


class _Sharing:
    """Decides how many samples one forward draws, before the hooks are active."""

    def __init__(self, model: nn.Module, hooks: Sequence[SiteHook], first: Inputs, settings: Settings) -> None:
        active = {*hooks, *(hook for _, hook in hooks_of(model) if hook.eval_rate is not None)}
        groups = [rows_alone(hook.regularizer) for hook in active if not hook.regularizer.in_backward]
        if not groups:
            raise InjectionError(
                "predict: the injection edits gradients only, so all samples would be equal.\n"
                "  inject a regularizer that changes the forward, such as Dropout(p=0.1)"
            )
        self.rows, self.masks = settings.rows, math.lcm(*(masks or 1 for masks in groups))
        if settings.samples % self.masks:
            raise ValueError(
                f"predict: the regularizer has {self.masks} fixed masks, so samples must be a multiple of it, got "
                f"{settings.samples}.\n  write: samples={self.masks}"
            )
        wanted = all(groups) and first.size is not None and (self.masks > 1 or self._samples_that_fit(first) > 1)
        self.possible = wanted and _rows_are_independent(model, first, settings)

    def samples_per_forward(self, inputs: Inputs) -> int:
        """Return how many samples each forward of a batch draws at most."""
        if self.possible and inputs.size is not None:
            return self.masks if self.masks > 1 else self._samples_that_fit(inputs)
        if self.masks == 1:
            return 1
        raise InjectionError(
            f"predict: {self.masks} fixed masks need forwards on {self.masks} copies of each row, but a forward of "
            "this model, its hooks or its arguments does not treat each row alone.\n"
            "  pass tensors with the batch at axis 0, and use no regularizer that draws once for the whole batch"
        )

    def _samples_that_fit(self, inputs: Inputs) -> int:
        """Return how many repetitions of a batch one forward may have, at least 1."""
        if inputs.size is None:
            return 1
        rows = self.rows or _ROWS
        if self.rows is None and all(x.device.type == "cpu" for x in inputs.tensors):
            rows = min(rows, _VALUES_ON_CPU * inputs.size // max(1, sum(x.numel() for x in inputs.tensors)))
        return max(1, rows // max(1, inputs.size))


def _rows_are_independent(model: nn.Module, inputs: Inputs, settings: Settings) -> bool:
    """Whether the first row has the same output alone as after a row of zeros.

    If not, axis 0 is not the batch (as in a recurrent network without `batch_first`), or rows influence each other.
    """
    alone = inputs.with_rows(lambda x: x[:1])
    both = alone.with_rows(lambda x: torch.cat([torch.zeros_like(x), x]))
    low = any(weight.dtype.itemsize < 4 for weight in model.parameters())
    try:
        with uncompiled(), forked_rng(model), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected, found = settings.call(model, alone), settings.call(model, both)
        tolerance = _TOLERANCE_16_BIT if low or torch.is_autocast_enabled(expected.device.type) else _TOLERANCE
        same_rows = (expected.shape[0], found.shape[0]) == (1, 2)
        return same_rows and bool((found[1:] - expected).abs().max() <= tolerance * expected.abs().max())
    except Exception:
        return False  # a fault of the input itself is raised by the first forward of the batch

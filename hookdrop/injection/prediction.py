"""Monte Carlo prediction: sample a model with its hooks active, and summarize the samples."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from hookdrop.hooks.hook import SiteHook
from hookdrop.hooks.registry import hooks_of
from hookdrop.injection.batches import Device, Inputs, is_batch, read_batches
from hookdrop.injection.uncertainty import Prediction, Statistics, Summary, concatenated
from hookdrop.regularizers import rows_alone
from hookdrop.survey.isolation import eval_mode, forked_rng, uncompiled
from hookdrop.utils.errors import InjectionError, ShapeError, warn
from hookdrop.utils.optional import progress_bar
from hookdrop.utils.tensor_tree import describe
from hookdrop.utils.validation import count, one_of

_ROWS = 256
_VALUES_ON_CPU = 2**18
"""The largest input of a repeated batch on a CPU. Above it, forwards of larger batches are not faster per row."""

_EQUAL = 1e-6
"""Up to this standard deviation, relative to the largest mean, samples differ by rounding only."""

_TOLERANCE, _TOLERANCE_16_BIT = 5e-3, 5e-2
"""The largest difference between outputs of one row in two batches, relative to the largest output."""


@dataclass(frozen=True)
class Settings:
    """The arguments of `Injection.predict`, validated."""

    samples: int
    activation: str | None = "softmax"
    output: Callable[[Any], Tensor] | None = None
    rows: int | None = None
    device: Device = None
    progress: bool | None = None

    def __post_init__(self) -> None:
        if count(self.samples, "samples", "predict") == 1:
            raise ValueError(
                "predict: samples must be at least 2, got 1: one sample has no variance.\n"
                "  one sample: with drop.sampling(), torch.no_grad(): model(x)"
            )
        one_of(self.activation, "activation", "predict", ("softmax", "sigmoid", None))
        one_of(self.progress, "progress", "predict", (True, False, None))
        if self.rows is not None:
            count(self.rows, "rows", "predict")
        if self.output is not None and not callable(self.output):
            raise TypeError(
                f"predict: output must be a function that picks a tensor from the model's output, got {self.output!r}."
                f"\n  write: output=lambda out: out[{self.output!r}]"
            )


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
    batches, length = read_batches(model, data, settings.device)
    total = None if length is None else length * settings.samples
    found: list[Statistics] = []
    forwards = 0
    with eval_mode(model), torch.no_grad(), progress_bar(total, settings.progress, not is_batch(data)) as advance:
        first = next(batches, None)
        if first is None:
            raise ValueError(
                f"predict: the {type(data).__name__} yields no batch.\n"
                "  a generator can be read only once: pass a DataLoader or a list"
            )
        sharing = _Sharing(model, hooks, first, settings)
        with sampling():
            for inputs in chain([first], batches):
                sizes = sharing.samples_per_forward(inputs)
                found.append(_sample(model, inputs, sizes, settings, advance))
                forwards += len(sizes)
    mean, variance, entropy, information = concatenated(found)
    if mean.numel() and variance.max().sqrt() <= _EQUAL * mean.abs().max():
        warn(
            f"predict: all {settings.samples} samples are equal up to rounding: no hook changed the output, or the "
            "activation saturates.\n  check that the hooked layers run: print(drop.probe(x))"
        )
    return Prediction(mean, variance, entropy, information, settings.samples, forwards)


class _Sharing:
    """Decides how many samples one forward draws, before the hooks are active."""

    def __init__(self, model: nn.Module, hooks: Sequence[SiteHook], first: Inputs, settings: Settings) -> None:
        active = {*hooks, *(hook for _, hook in hooks_of(model) if hook.eval_rate is not None)}
        regularizers = [hook.regularizer for hook in active if not hook.regularizer.in_backward]
        if not regularizers:
            raise InjectionError(
                "predict: the injection edits gradients only, so all samples would be equal.\n"
                "  inject a regularizer that changes the forward, such as Dropout(p=0.1)"
            )
        self.samples = settings.samples
        self.rows = settings.rows
        groups = [rows_alone(regularizer) for regularizer in regularizers]
        self.masks = math.lcm(*(count or 1 for count in groups))
        independent = all(groups)
        wanted = self.masks > 1 or self._samples_that_fit(first) > 1
        repeatable = independent and wanted and first.size is not None
        self.possible = repeatable and _rows_are_independent(model, first, settings)

    def samples_per_forward(self, inputs: Inputs) -> list[int]:
        """Return how many samples each forward of a batch draws."""
        if self.masks > 1:
            self._check_masks(inputs)
            return [self.masks] * (self.samples // self.masks)
        most = self._samples_that_fit(inputs) if self.possible else 1
        forwards = -(-self.samples // most)
        low, larger = divmod(self.samples, forwards)
        return [low + 1] * larger + [low] * (forwards - larger)

    def _samples_that_fit(self, inputs: Inputs) -> int:
        """Return how many repetitions of a batch one forward may have, at least 1."""
        if inputs.size is None:
            return 1
        rows = self.rows or _ROWS
        if self.rows is None and all(x.device.type == "cpu" for x in inputs.tensors):
            rows = min(rows, _VALUES_ON_CPU * inputs.size // max(1, sum(x.numel() for x in inputs.tensors)))
        return max(1, rows // max(1, inputs.size))

    def _check_masks(self, inputs: Inputs) -> None:
        if self.samples % self.masks:
            raise ValueError(
                f"predict: the regularizer has {self.masks} fixed masks, so samples must be a multiple of it, got "
                f"{self.samples}.\n  write: samples={self.masks}"
            )
        if not self.possible or inputs.size is None:
            raise InjectionError(
                f"predict: {self.masks} fixed masks need forwards on {self.masks} copies of each row, but a forward of "
                "this model, its hooks or its arguments does not treat each row alone.\n"
                "  pass tensors with the batch at axis 0, and use no regularizer that draws once for the whole batch"
            )


def _sample(
    model: nn.Module, inputs: Inputs, sizes: Sequence[int], settings: Settings, advance: Callable[[int], object]
) -> Statistics:
    """Return the statistics of one batch, on the CPU."""
    summary = Summary(settings.activation)
    for size in sizes:
        summary.add(_call(model, inputs.repeated(size), settings), size)
        advance(size)
    return summary.statistics()


def _call(model: nn.Module, inputs: Inputs, settings: Settings) -> Tensor:
    """Call the model and return the tensor to summarize."""
    try:
        out = model(*inputs.args, **inputs.kwargs)
    except Exception as error:
        error.add_note(
            f"hookdrop's predict called the model with {describe((*inputs.args, *inputs.kwargs.values()))}. A list or "
            "another iterable is read as a loader of batches; of a batch in it, the first element is the input."
        )
        raise
    picked: object = out if isinstance(out, Tensor) else getattr(out, "logits", None)
    if settings.output is not None:
        picked = settings.output(out)
    if not isinstance(picked, Tensor):
        what = "the model returns" if settings.output is None else "no tensor was picked from"
        raise TypeError(
            f"predict: {what} {describe(out)}.\n  pass a function that picks the tensor: output=lambda out: out[...]"
        )
    if not picked.is_floating_point() or picked.dim() == 0:
        raise ShapeError(
            f"predict: the output must be a floating-point tensor with one row per input, got {tuple(picked.shape)} "
            f"{picked.dtype}.\n  pass a function that picks the tensor: output=lambda out: out[...]"
        )
    return picked


def _rows_are_independent(model: nn.Module, inputs: Inputs, settings: Settings) -> bool:
    """Whether the first row has the same output alone as after a row of zeros.

    If not, axis 0 is not the batch (as in a recurrent network without `batch_first`), or rows influence each other.
    """
    alone = inputs.of_tensors(lambda x: x[:1])
    both = alone.of_tensors(lambda x: torch.cat([torch.zeros_like(x), x]))
    low = any(weight.dtype.itemsize < 4 for weight in model.parameters())
    try:
        with uncompiled(), forked_rng(model), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected, found = _call(model, alone, settings), _call(model, both, settings)
        tolerance = _TOLERANCE_16_BIT if low or torch.is_autocast_enabled(expected.device.type) else _TOLERANCE
        same_rows = (expected.shape[0], found.shape[0]) == (1, 2)
        return same_rows and bool((found[1:] - expected).abs().max() <= tolerance * expected.abs().max())
    except Exception:
        return False  # a fault of the input itself is raised by the first forward of the batch

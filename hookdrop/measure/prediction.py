"""Monte Carlo prediction: sample a model with its hooks active, and summarize the samples."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.special import entr

from hookdrop.core.arguments import count, one_of
from hookdrop.core.errors import InjectionError, ShapeError, warn
from hookdrop.core.hook import SiteHook
from hookdrop.core.registry import hooks_of
from hookdrop.core.regularizer import rows_alone
from hookdrop.core.selection import unwrapped
from hookdrop.core.sink import RateSink
from hookdrop.core.tensor_tree import describe, map_leaves
from hookdrop.survey.isolation import eval_mode

# --- statistics


@dataclass(frozen=True, eq=False, repr=False)
class Prediction:
    """The result of `Injection.predict`: statistics over the samples, on the CPU.

    "Probabilities" are the model's outputs after the activation; with `activation=None`, the outputs themselves. The
    tensors have the floating-point type of the outputs, but at least float32.
    """

    mean: Tensor
    """The mean of the probabilities, with the shape of the output: (N, C), (N, C, H, W), ..."""
    variance: Tensor
    """The variance of the probabilities over the samples (the sum of squares / (samples - 1)), with the same shape."""
    entropy: Tensor | None
    """The entropy of the mean, in nats: the total uncertainty. The shape lacks the class axis: (N,), (N, H, W), ... For
    a sigmoid it is the entropy of each label, with the shape of the output. None without an activation."""
    mutual_information: Tensor | None
    """The entropy of the mean minus the mean entropy of the samples, in nats, at least 0: the uncertainty that comes
    from the model (BALD). It has the shape of `entropy`."""
    samples: int  #: The number of samples.

    def __repr__(self) -> str:
        averages = {"std": self.variance.sqrt(), "entropy": self.entropy, "mutual information": self.mutual_information}
        known = [f"{name} {values.mean():.3g}" for name, values in averages.items() if values is not None]
        return f"<Prediction {tuple(self.mean.shape)} from {self.samples} samples; on average: {', '.join(known)}>"


class Summary:
    """Running statistics of the samples of one batch. It stores no sample."""

    def __init__(self, activation: str | None) -> None:
        self.activation = activation
        self.count = 0
        self.mean = self.squares = self.entropies = torch.zeros((), device="cpu")
        """The mean, the sum of squared deviations from it (Welford 1962), and the sum of the entropies."""

    def add(self, out: Tensor, samples: int) -> None:
        """Add the output (samples * N, ...) of one forward."""
        out = out.to(torch.promote_types(out.dtype, torch.float32))
        if self.count == 0 and self.activation == "softmax":
            _check_classes(out)
        if self.activation is not None:
            out = torch.softmax(out, class_axis(out)) if self.activation == "softmax" else out.sigmoid()
        for sample in out.reshape(samples, out.shape[0] // samples, *out.shape[1:]):
            self.count += 1
            difference = sample - self.mean
            self.mean = self.mean + difference / self.count
            self.squares = self.squares + difference * (sample - self.mean)
            if self.activation is not None:
                self.entropies = self.entropies + self._entropy(sample)

    def prediction(self) -> Prediction:
        """Return the statistics so far, on the CPU."""
        mean, variance, entropy, information = self.mean.cpu(), (self.squares / (self.count - 1)).cpu(), None, None
        if self.activation is not None:
            entropy = self._entropy(self.mean).cpu()
            information = (entropy - self.entropies.cpu() / self.count).clamp_min(0.0)  # rounding may give -1e-8
        return Prediction(mean, variance, entropy, information, self.count)

    def _entropy(self, probabilities: Tensor) -> Tensor:
        terms: Tensor = entr(probabilities)
        softmax = self.activation == "softmax"
        return terms.sum(class_axis(probabilities)) if softmax else terms + entr(1.0 - probabilities)


def class_axis(out: Tensor) -> int:
    """Return 1 for maps and volumes, (N, C, H, W) and (N, C, D, H, W), otherwise the last axis."""
    return 1 if out.dim() in (4, 5) else out.dim() - 1


def _check_classes(out: Tensor) -> None:
    """Raise if the softmax over the class axis would be constant, and warn if the model has applied one."""
    axis = class_axis(out)
    if axis == 0 or out.shape[axis] == 1:
        shape = ", ".join(["N", *map(str, out.shape[1:])])
        raise ValueError(
            f"predict: the softmax needs two classes on an axis after the batch, but the output is ({shape}).\n"
            '  binary or multi-label logits: activation="sigmoid"   regression: activation=None'
        )
    if out.numel() and bool((out >= 0).all()) and bool(((out.sum(axis) - 1).abs() < 1e-3).all()):
        warn(
            "predict: the outputs of the model sum to 1, as probabilities do, and predict applies a softmax to them.\n"
            "  return logits, or pass the logarithms: output=lambda out: out.log()"
        )


def concatenated(parts: Sequence[Prediction]) -> Prediction:
    """Concatenate the statistics of batches along axis 0."""
    names = ("mean", "variance", "entropy", "mutual_information")
    known = {name: [getattr(part, name) for part in parts] for name in names if getattr(parts[0], name) is not None}
    joined: dict[str, Any] = {name: torch.cat(tensors) for name, tensors in known.items()}
    return replace(parts[0], **joined)


# --- sampling


@dataclass(frozen=True)
class Inputs:
    """The arguments of one call of the model."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def map(self, change: Callable[[Any], Any]) -> Inputs:
        """Apply `change` to each argument."""
        return Inputs(tuple(map(change, self.args)), {name: change(value) for name, value in self.kwargs.items()})

    def repeated(self, times: int) -> Inputs:
        """All rows, then all rows again, and so on: (times * N, ...)."""
        if times == 1:
            return self
        sizes = {x.shape[:1] for x in (*self.args, *self.kwargs.values()) if isinstance(x, Tensor)}
        if len(sizes) != 1 or () in sizes:
            raise InjectionError(
                f"predict: {times} fixed masks need a forward on {times} copies of each row, but the arguments are not "
                "tensors with the same number of rows.\n  pass tensors with the batch at axis 0"
            )
        return self.map(lambda value: torch.cat([value] * times) if isinstance(value, Tensor) else value)


def _accepts(function: Callable[..., Any], inputs: Inputs) -> bool:
    try:
        inspect.signature(function).bind(*inputs.args, **inputs.kwargs)
    except TypeError:
        return False
    return True


def _arguments(function: Callable[..., Any], given: Any) -> Inputs:
    """Return the inputs of a loader's batch as the arguments that a function takes: one or, as it must be, several."""
    one, several = Inputs((given,), {}), Inputs(tuple(given) if isinstance(given, list | tuple) else (given,), {})
    if isinstance(given, Mapping):
        known = inspect.signature(function).parameters
        several = Inputs((), {key: x for key, x in given.items() if key in known or key not in ("labels", "label")})
        if _accepts(function, several) or not known.keys().isdisjoint(several.kwargs):
            return several
    return one if _accepts(function, one) else several


def _read_batches(model: nn.Module, data: Any, call: Callable[..., Any] | None) -> Iterator[Inputs]:
    """Yield the inputs of each batch, on the device of the model."""
    device = next((weight.device for weight in model.parameters() if weight.device.type != "meta"), None)
    if isinstance(data, Tensor | tuple | Mapping):
        data = [Inputs(data, {}) if isinstance(data, tuple) else data]
    elif isinstance(data, str | bytes) or not isinstance(data, Iterable) or hasattr(data, "__array__"):
        raise TypeError(
            f"predict: expected a tensor, a tuple of arguments, a mapping of keyword arguments or a loader, got "
            f"{type(data).__name__}.\n  an array: torch.as_tensor(x)   one argument of another type: (x,)"
        )

    function = call or unwrapped(model).forward

    def move(x: Any) -> Any:
        return x.to(device) if device is not None and hasattr(x, "to") else x

    for batch in data:
        batch = batch[0] if isinstance(batch, list | tuple) else batch
        inputs = batch if isinstance(batch, Inputs) else _arguments(function, batch)
        if not _accepts(function, inputs):
            raise TypeError(
                f"predict: {function.__qualname__} does not take {describe(inputs.args or inputs.kwargs)}.\n"
                "  of a batch with targets: predict(x) or predict([batch])   other arguments: call=lambda x: model(...)"
            )
        yield inputs.map(lambda x: move(x) if hasattr(x, "to") else map_leaves(x, move))


def _call(model: Callable[..., Any], inputs: Inputs, output: Callable[[Any], Tensor] | None) -> Tensor:
    """Call the model or what stands for it, and return the tensor to summarize."""
    out = model(*inputs.args, **inputs.kwargs)
    picked: object = out if isinstance(out, Tensor) else getattr(out, "logits", None)
    if output is not None:
        picked = output(out)
    pick = "\n  pass a function that picks the tensor: output=lambda out: out[...]"
    if not isinstance(picked, Tensor):
        what = "the model returns" if output is None else "no tensor was picked from"
        raise TypeError(f"predict: {what} {describe(out)}.{pick}")
    if not picked.is_floating_point() or picked.dim() == 0:
        raise ShapeError(
            "predict: the output must be a floating-point tensor with one row per input, got "
            f"{tuple(picked.shape)} {picked.dtype}.{pick}"
        )
    return picked


def predict(
    model: nn.Module,
    sinks: Sequence[RateSink],
    sampling: AbstractContextManager[object],
    data: Any,
    samples: int,
    activation: str | None,
    output: Callable[[Any], Tensor] | None,
    call: Callable[..., Any] | None,
) -> Prediction:
    """Sample `model` on `data` inside `sampling`, which activates `sinks`. See `Injection.predict`."""
    if count(samples, "samples", "predict", 0) < 2:
        raise ValueError(
            f"predict: samples must be at least 2, got {samples}: one sample has no variance.\n"
            "  one sample: with drop.sampling(), torch.no_grad(): model(x)"
        )
    one_of(activation, "activation", "predict", ("softmax", "sigmoid", None))
    if all(isinstance(sink, SiteHook) and sink.regularizer.in_backward for sink in sinks):
        raise InjectionError(
            "predict: the injection leaves the forward unchanged, so all samples would be equal.\n"
            "  inject a regularizer that changes the forward, such as Dropout(p=0.1)"
        )
    found: list[Prediction] = []
    with eval_mode(model), torch.no_grad(), sampling:
        masks = _fixed_masks(model, samples)
        for inputs in _read_batches(model, data, call):
            summary, repeated = Summary(activation), inputs.repeated(masks)
            for _ in range(samples // masks):
                summary.add(_call(call or model, repeated, output), masks)
            found.append(summary.prediction())
    if not found:
        raise ValueError(
            f"predict: the {type(data).__name__} yields no batch.\n"
            "  a generator can be read only once: pass a DataLoader or a list"
        )
    prediction = concatenated(found)
    if prediction.mean.numel() and prediction.variance.max().sqrt() <= 1e-6 * prediction.mean.abs().max():
        warn(
            f"predict: all {samples} samples are equal up to rounding: no hook changed the output, or the "
            "activation saturates.\n  check that the hooked layers run: print(drop.probe(x))"
        )
    return prediction


def samples(
    model: nn.Module,
    sampling: Callable[[], AbstractContextManager[object]],
    batch: Any,
    n: int,
    call: Callable[..., Any] | None,
) -> Iterator[Any]:
    """See `Injection.samples`. Each sample enters its own contexts, so that the caller's code runs outside of them."""
    (inputs,) = _read_batches(model, batch if isinstance(batch, Tensor | tuple | Mapping) else (batch,), call)

    def sample() -> Any:
        with eval_mode(model), torch.no_grad(), sampling():
            _fixed_masks(model, 1)
            return (call or model)(*inputs.args, **inputs.kwargs)

    return (sample() for _ in range(count(n, "n", "samples")))


def _fixed_masks(model: nn.Module, samples: int) -> int:
    """Return the number of fixed masks of the active hooks, all of which one forward applies; 1 if masks are drawn."""
    active = [hook for _, hook in hooks_of(model) if hook.eval_rate is not None and not hook.regularizer.in_backward]
    groups = [0 if hook.at == "parameters" else rows_alone(hook.regularizer) for hook in active]
    masks = math.lcm(*(number or 1 for number in groups))
    if masks > 1 and not all(groups):
        raise InjectionError(
            f"predict: {masks} fixed masks need a forward on {masks} copies of each row, but another regularizer draws "
            "once for the whole batch.\n  sample each injection on its own: find(model)[name].predict(x)"
        )
    if samples % masks:
        raise ValueError(
            f"predict: the regularizer has {masks} fixed masks, so samples must be a multiple of it, got {samples}.\n"
            f"  write: drop.predict(x, samples={masks})"
        )
    return masks

"""Statistics of Monte Carlo samples: mean, variance, entropy and mutual information."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.special import entr

from hookdrop.utils.errors import warn


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
    samples: int
    """The number of samples."""

    def __repr__(self) -> str:
        averages = {"std": self.variance.sqrt(), "entropy": self.entropy, "mutual information": self.mutual_information}
        known = [f"{name} {values.mean():.3g}" for name, values in averages.items() if values is not None]
        return f"<Prediction {tuple(self.mean.shape)} from {self.samples} samples; on average: {', '.join(known)}>"


class Summary:
    """Running statistics of the samples of one batch. It stores no sample."""

    def __init__(self, activation: str | None) -> None:
        self.activation = activation
        self.count = 0
        self.mean = self.squares = self.entropies = torch.zeros(())
        """The mean, the sum of squared deviations from it, and the sum of the entropies of the samples."""

    def add(self, out: Tensor, samples: int) -> None:
        """Add the output (samples * N, ...) of one forward."""
        out = out.to(torch.promote_types(out.dtype, torch.float32))
        if self.count == 0 and self.activation == "softmax":
            _check_classes(out)
        if self.activation is not None:
            out = torch.softmax(out, class_axis(out)) if self.activation == "softmax" else out.sigmoid()
            self.entropies = self.entropies + _by_sample(self._entropy(out), samples).sum(0)
        values = _by_sample(out, samples)
        # Merge the means and squares of two groups of samples (Chan, Golub & LeVeque 1983, equations 2.1).
        mean = values.mean(0)
        difference, total = mean - self.mean, self.count + samples
        between = difference.square() * (self.count * samples / total)
        self.squares = self.squares + (values - mean).square().sum(0) + between
        self.mean = self.mean + difference * (samples / total)
        self.count = total

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


def _by_sample(x: Tensor, samples: int) -> Tensor:
    """(samples * N, ...) -> (samples, N, ...)."""
    return x.reshape(samples, x.shape[0] // samples, *x.shape[1:])


def class_axis(out: Tensor) -> int:
    """Return 1 for maps and volumes, (N, C, H, W) and (N, C, D, H, W), otherwise the last axis."""
    return 1 if out.dim() in (4, 5) else out.dim() - 1


def _check_classes(out: Tensor) -> None:
    """Raise if the softmax over the class axis would be constant, and warn if the model has applied one."""
    axis = class_axis(out)
    if axis == 0 or out.shape[axis] == 1:
        shape = ", ".join(["N", *map(str, out.shape[1:])])
        raise ValueError(
            f"predict: the softmax needs two classes, but the output is ({shape}): axis {axis} "
            f"{'is the batch' if axis == 0 else 'has one class, whose probability would always be 1'}.\n"
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

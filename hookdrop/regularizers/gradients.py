"""Edits of the gradient of a hooked tensor; the tensor itself stays what it is.

They act on the gradient of an activation, where it comes back through the layer, and not on the gradients of
parameters: those are clipped by `torch.nn.utils.clip_grad_norm_` before `optimizer.step()`. All that lies before the
layer is trained by the edited gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from hookdrop import functional
from hookdrop.functional.gradients import clamp_limits, clip_limits
from hookdrop.regularizers.base import Regularizer, needs_samples
from hookdrop.utils.validation import number


class _ActivationGrad(Regularizer):
    rate_name: ClassVar[str | None] = None
    drops: ClassVar[bool] = False
    probability: ClassVar[bool] = False
    in_backward: ClassVar[bool] = True


class ClipActivationGrad(_ActivationGrad):
    """Clip the gradient of the activation: to an L2 norm of at most `max_norm`, or to [-max_value, max_value].

    For the gradients of parameters use `torch.nn.utils.clip_grad_norm_`.

    Args:
        max_norm: above 0; a gradient that is longer is scaled down to it. Give this or `max_value`.
        max_value: above 0; each element is clamped by itself.
        per_sample: the norm is that of each sample (axis 0) instead of that of the whole tensor.

    Shape: any; (N, ...) with `per_sample`.

    Under a `GradScaler` the gradient here carries the loss scale, and so must the limit. `max_norm` lets an overflow
    through as NaN, which the scaler sees; `max_value` makes numbers of infinities.

    Example:
        >>> x = torch.ones(4, requires_grad=True)
        >>> ClipActivationGrad(max_norm=1.0)(x).sum().backward()
        >>> x.grad
        tensor([0.5000, 0.5000, 0.5000, 0.5000])

    Reference: Pascanu et al. 2013, "On the difficulty of training recurrent neural networks", arXiv:1211.5063 (of
    parameters' gradients, by norm); Graves 2013, arXiv:1308.0850, section 2.1 (at a layer, by value).
    """

    def __init__(self, max_norm: float | None = None, max_value: float | None = None, per_sample: bool = False) -> None:
        super().__init__()
        self.max_norm, self.max_value, self.per_sample = clip_limits(max_norm, max_value, per_sample, self.title)

    def check(self, shape: Sequence[int]) -> None:
        if self.per_sample:
            needs_samples(shape)

    def reading(self, shape: Sequence[int]) -> str:
        return f"N={shape[0]}" if self.per_sample else ""

    def regularize(self, x: Tensor) -> Tensor:
        return functional.clip_activation_grad(x, self.max_norm, self.max_value, self.per_sample)


class ClampActivationGrad(_ActivationGrad):
    """Clamp the gradient of the activation to [min, max], element by element.

    For the gradients of parameters use `torch.nn.utils.clip_grad_value_`.

    Args:
        min: the least value; None is no limit.
        max: the largest value; None is no limit, of one of the two. `min=0` lets only rising ones through.

    Shape: any. Under a `GradScaler` the gradient here carries the loss scale.

    Reference: Graves 2013, "Generating sequences with recurrent neural networks", arXiv:1308.0850, section 2.1.
    """

    def __init__(self, min: float | None = None, max: float | None = None) -> None:
        super().__init__()
        self.min, self.max = clamp_limits(min, max, self.title)

    def regularize(self, x: Tensor) -> Tensor:
        return functional.clamp_activation_grad(x, self.min, self.max)


class ScaleActivationGrad(_ActivationGrad):
    """Multiply the gradient of the activation by `factor`: 0 stops it, -1 reverses it, 1 does nothing.

    A schedule drives the factor, and multiplies it: `LinearSchedule` on -1 goes from 0 (nothing passes) to -1. That
    ramp is straight where the paper's is 2 / (1 + exp(-10 p)) - 1, p from 0 to 1:
    `LambdaSchedule(lambda step: 2 / (1 + math.exp(-10 * min(1, step / steps))) - 1)`. While disabled the factor is 1.
    To scale the gradients of parameters give their group another learning rate.

    For domain-adversarial training hook the input of the domain head: at its output the head itself would be trained
    backwards, to tell the domains worse.

    Args:
        factor: any number.

    Shape: any.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> ScaleActivationGrad(-1)(x).sum().backward()
        >>> x.grad
        tensor([-1., -1.])

        The features learn what tells the labels, and unlearn what tells the domains:

        >>> from torch import nn
        >>> from hookdrop import LinearSchedule, inject
        >>> class Dann(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.features, self.label, self.domain = nn.Linear(8, 4), nn.Linear(4, 3), nn.Linear(4, 2)
        ...     def forward(self, x):
        ...         features = self.features(x).relu()
        ...         return self.label(features), self.domain(features)
        >>> model = Dann()
        >>> drop = inject(
        ...     model, ScaleActivationGrad(-1.0), layers="domain", at="input", schedule=LinearSchedule(steps=100)
        ... )
        >>> optimizer, loss = torch.optim.SGD(model.parameters(), 0.1), nn.CrossEntropyLoss()
        >>> for step in range(3):
        ...     label, domain = model(torch.randn(6, 8))
        ...     (loss(label, torch.arange(6) % 3) + loss(domain, torch.arange(6) % 2)).backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     drop.step()

    Reference: Ganin & Lempitsky 2015, "Unsupervised domain adaptation by backpropagation", arXiv:1409.7495 (the
    gradient reversal layer).
    """

    rate_name: ClassVar[str | None] = "factor"
    neutral: ClassVar[float] = 1.0

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = self.valid_rate(factor)

    def valid_rate(self, value: object) -> float:
        return number(value, "factor", self.title)

    def regularize_at(self, x: Tensor, rate: float | Tensor) -> Tensor:
        return functional.scale_activation_grad(x, rate)


class NoiseActivationGrad(_ActivationGrad):
    """Add N(0, std^2) to the gradient of the activation. A schedule drives `std`.

    Departs from the paper, which adds noise to the gradients of parameters, annealed by the step: here it is added to
    the gradient of what is hooked, and reaches all layers before it.

    Args:
        std: standard deviation in the units of the gradient there, at least 0. With a loss that is a mean over the
            batch they fall with its size, and under a `GradScaler` they carry the loss scale.

    Shape: any. The noise is drawn in the backward pass, from PyTorch's global generators.

    Reference: Neelakantan et al. 2015, "Adding gradient noise improves learning for very deep networks",
    arXiv:1511.06807.
    """

    rate_name: ClassVar[str | None] = "std"
    max_rate: ClassVar[float] = math.inf

    def __init__(self, std: float) -> None:
        super().__init__()
        self.std = self.valid_rate(std)

    def regularize_at(self, x: Tensor, rate: float | Tensor) -> Tensor:
        return functional.noise_activation_grad(x, rate)

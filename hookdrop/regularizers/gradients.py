"""Edits of the gradient of an activation. The forward output equals the input.

The edited gradient trains all layers before the hooked one. For the gradients of parameters use
`torch.nn.utils.clip_grad_norm_` or `clip_grad_value_` before `optimizer.step()`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.compiler import is_compiling

from hookdrop.core import torch_internals as internals
from hookdrop.core.arguments import floating, number, one_of, positive
from hookdrop.core.regularizer import STD, Rate, Regularizer
from hookdrop.kernels.masking import HALF
from hookdrop.kernels.random_numbers import randn_like

_FACTOR = Rate("factor", -math.inf, math.inf, neutral=1.0, kind="factor")


def clip_activation_grad(
    x: Tensor,
    max_norm: float | None = None,
    max_value: float | None = None,
    per_sample: bool = False,
    training: bool = True,
) -> Tensor:
    """Return `x` and clip its gradient to an L2 norm or to a range: see `ClipActivationGrad`."""
    max_norm, max_value, per_sample = _clip_limits(max_norm, max_value, per_sample, "clip_activation_grad")
    floating(x, "clip_activation_grad")
    edit: Any = (_clip_norm, max_norm, per_sample) if max_value is None else (torch.clamp, -max_value, max_value)
    return _edit_gradient(x, *edit) if training else x


def _clip_limits(
    max_norm: object, max_value: object, per_sample: object, owner: str
) -> tuple[float | None, float | None, bool]:
    if (max_norm is None) == (max_value is None):
        raise TypeError(f"{owner}: pass either max_norm or max_value.\n  for example: {owner}(max_norm=1.0)")
    one_of(per_sample, "per_sample", owner, (True, False))
    if max_value is not None and per_sample:
        raise ValueError(f"{owner}: per_sample=True applies to max_norm only; max_value clips each element.")
    name, value = ("max_value", max_value) if max_norm is None else ("max_norm", max_norm)
    limit = positive(value, name, owner, "\n  to stop the gradient: ScaleActivationGrad(0)")
    return (limit, None, bool(per_sample)) if max_value is None else (None, limit, False)


def clamp_activation_grad(
    x: Tensor, min: float | None = None, max: float | None = None, training: bool = True
) -> Tensor:
    """Return `x` and clamp its gradient to [min, max] elementwise: see `ClampActivationGrad`."""
    limits = _clamp_limits(min, max, "clamp_activation_grad")
    floating(x, "clamp_activation_grad")
    return _edit_gradient(x, torch.clamp, *limits) if training else x


def _clamp_limits(low: object, high: object, owner: str) -> tuple[float | None, float | None]:
    if low is None and high is None:
        raise TypeError(f"{owner}: pass min, max or both.\n  for example: {owner}(min=-1.0, max=1.0)")
    least = None if low is None else number(low, "min", owner)
    most = None if high is None else number(high, "max", owner)
    if least is not None and most is not None and least > most:
        raise ValueError(f"{owner}: min must not be above max, got min={least:g} and max={most:g}.")
    return least, most


def scale_activation_grad(x: Tensor, factor: float | Tensor, training: bool = True) -> Tensor:
    """Return `x` and multiply its gradient by `factor`: see `ScaleActivationGrad`."""
    factor = _FACTOR.argument(factor, x, "scale_activation_grad")
    return _edit_gradient(x, _scale, factor) if training and (isinstance(factor, Tensor) or factor != 1.0) else x


def noise_activation_grad(x: Tensor, std: float | Tensor, training: bool = True) -> Tensor:
    """Return `x` and add N(0, std^2) to its gradient: see `NoiseActivationGrad`."""
    std = STD.argument(std, x, "noise_activation_grad")
    return _edit_gradient(x, _add_noise, std) if training and (isinstance(std, Tensor) or std != 0.0) else x


def _edit_gradient(x: Tensor, edit: Callable[..., Tensor], *settings: Any) -> Tensor:
    """Return a copy of `x` whose gradient is replaced by `edit(gradient, *settings)`.

    Gradients that reach `x` by other paths are not edited, and the copy may be modified in place.
    """
    if is_compiling():
        return _EditGradient.apply(x, edit, *settings) if torch.is_grad_enabled() and x.requires_grad else x
    # Inside a transform, `requires_grad` does not tell whether a slice needs a gradient.
    if internals.functorch_stack() is not None or internals.forward_ad_level() >= 0:
        y: Tensor = _EditGradientInTransform.apply(x, edit, *settings)
    elif not (torch.is_grad_enabled() and x.requires_grad):
        return x
    elif type(x) not in internals.PLAIN_TYPES and internals.wraps_results(x):
        return internals.on_plain_tensor(_edit_gradient, x, edit, *settings)
    else:
        y = _EditGradient.apply(x, edit, *settings)
    return y


class _EditGradient(torch.autograd.Function):
    """Not a tensor hook on a copy: PyTorch 2.6 cannot compile it, and ignores it in `grad` of `vmap`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, edit: Callable[..., Tensor], *settings: Any) -> Tensor:
        ctx.edit, ctx.settings = edit, settings
        # A view of the input cannot be modified in place (pytorch#61519).
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.edit(grad, *ctx.settings), None, *[None] * len(ctx.settings)


class _EditGradientInTransform(torch.autograd.Function):
    """`_EditGradient` for `torch.func`, where each slice of a `vmap` has its own gradient, and for forward mode."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, edit: Callable[..., Tensor], *settings: Any) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.edit, *ctx.settings = inputs

    backward = _EditGradient.backward

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return tangent.clone()


def _clip_norm(grad: Tensor, max_norm: float, per_sample: bool) -> Tensor:
    """Scale `grad` down to an L2 norm of at most `max_norm`, as a whole or per sample."""
    if not grad.numel():
        return grad
    wide = grad.to(torch.float32) if grad.dtype in HALF else grad
    # The extra last axis keeps the list from being empty, which PyTorch would interpret as all axes.
    axes = list(range(1 if per_sample else 0, grad.dim() + 1))
    # Divide by the largest element, because squares of large numbers overflow.
    largest = wide.detach().abs().unsqueeze(-1).amax(axes, keepdim=True).squeeze(-1)
    # The derivative of a division by zero would be NaN.
    largest = torch.where(largest == 0.0, 1.0, largest)
    part = wide / largest
    norm: Tensor = torch.linalg.vector_norm(part.unsqueeze(-1), dim=axes, keepdim=True).squeeze(-1)
    short = norm * largest <= max_norm  # False for NaN after an overflow
    return torch.where(short, wide, part * (max_norm / torch.where(short, 1.0, norm))).to(grad.dtype)


def _scale(grad: Tensor, factor: float | Tensor) -> Tensor:
    if not isinstance(factor, Tensor) and factor != 0.0:
        return grad * factor
    # A factor of 0 also stops infinite gradients. Compare on the gradient's device; `factor` may be on another.
    return torch.where(grad.new_zeros(()) == factor, 0.0, grad * factor)


def _add_noise(grad: Tensor, std: float | Tensor) -> Tensor:
    # PyTorch 2.6 derives bfloat16 normal numbers from bfloat16 uniform ones, which take only a few values.
    noise = randn_like(grad, torch.promote_types(grad.dtype, torch.float32))
    return (grad + noise * std).to(grad.dtype)


class _ActivationGrad(Regularizer):
    rate: ClassVar[Rate | None] = None
    in_backward: ClassVar[bool] = True


class ClipActivationGrad(_ActivationGrad):
    """Clip the gradient of the activation to an L2 norm of at most `max_norm`, or to [-max_value, max_value].

    Args:
        max_norm: > 0. A longer gradient is scaled down to this norm. Pass either this or `max_value`.
        max_value: > 0. Each element is clamped.
        per_sample: clip the norm of each sample (axis 0) instead of the norm of the whole tensor.

    Shape: any; with `per_sample`, (N, ...).

    With a `GradScaler`, multiply the limit by the loss scale. `max_norm` turns an overflow into NaN, which the scaler
    detects; `max_value` makes infinities finite.

    Example:
        >>> x = torch.ones(4, requires_grad=True)
        >>> ClipActivationGrad(max_norm=1.0)(x).sum().backward()
        >>> x.grad
        tensor([0.5000, 0.5000, 0.5000, 0.5000])

    Reference: Pascanu et al. 2013, "On the difficulty of training recurrent neural networks", arXiv:1211.5063
    (parameter gradients, by norm); Graves 2013, arXiv:1308.0850, section 2.1 (at a layer, by value).
    """

    def __init__(self, max_norm: float | None = None, max_value: float | None = None, per_sample: bool = False) -> None:
        super().__init__()
        self.max_norm, self.max_value, self.per_sample = _clip_limits(max_norm, max_value, per_sample, self.title)
        self.axes = "N ..." if self.per_sample else "..."

    def regularize(self, x: Tensor, rate: None) -> Tensor:
        return clip_activation_grad(x, self.max_norm, self.max_value, self.per_sample)


class ClampActivationGrad(_ActivationGrad):
    """Clamp the gradient of the activation to [min, max], element by element.

    Args:
        min: the lower limit, or None. `min=0` sets negative elements to 0.
        max: the upper limit, or None. Pass at least one of the two.

    Shape: any. With a `GradScaler`, multiply the limits by the loss scale.

    Reference: Graves 2013, "Generating sequences with recurrent neural networks", arXiv:1308.0850, section 2.1.
    """

    def __init__(self, min: float | None = None, max: float | None = None) -> None:
        super().__init__()
        self.min, self.max = _clamp_limits(min, max, self.title)

    def regularize(self, x: Tensor, rate: None) -> Tensor:
        return clamp_activation_grad(x, self.min, self.max)


class ScaleActivationGrad(_ActivationGrad):
    """Multiply the gradient of the activation by `factor`: 0 stops it, -1 reverses it, 1 does nothing.

    A schedule multiplies the factor: with `LinearSchedule`, -1 ramps linearly from 0 (no gradient) to -1. The paper's
    ramp is 2 / (1 + exp(-10 p)) - 1, p from 0 to 1:
    `LambdaSchedule(lambda step: 2 / (1 + math.exp(-10 * min(1, step / steps))) - 1)`. While disabled, the factor is 1.
    To scale the gradients of parameters, use another learning rate for their parameter group.

    For domain-adversarial training, hook the input of the domain head: a hook at its output would also reverse the
    gradient of the head.

    Args:
        factor: any finite number.

    Shape: any.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> ScaleActivationGrad(-1)(x).sum().backward()
        >>> x.grad
        tensor([-1., -1.])

    Reference: Ganin & Lempitsky 2015, "Unsupervised domain adaptation by backpropagation", arXiv:1409.7495 (the
    gradient reversal layer).
    """

    rate: ClassVar[Rate] = _FACTOR
    regularize = staticmethod(scale_activation_grad)

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = self.rate.valid(factor, self.title)


class NoiseActivationGrad(_ActivationGrad):
    """Add N(0, std^2) to the gradient of the activation. A schedule drives `std`.

    Unlike the paper, which adds annealed noise to the gradients of parameters, this noise reaches all layers before the
    hooked one.

    Args:
        std: standard deviation in the units of the gradient, at least 0. If the loss is a mean over the batch, the
            gradient shrinks with the batch size; a `GradScaler` multiplies it by the loss scale.

    Shape: any. The backward pass draws the noise from PyTorch's global RNG.

    Reference: Neelakantan et al. 2015, "Adding gradient noise improves learning for very deep networks",
    arXiv:1511.06807.
    """

    rate: ClassVar[Rate] = STD
    regularize = staticmethod(noise_activation_grad)

    def __init__(self, std: float) -> None:
        super().__init__()
        self.std = self.rate.valid(std, self.title)

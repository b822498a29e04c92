"""Gradient edits and the autograd functions that apply them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from hookdrop.kernels.masking import HALF
from hookdrop.kernels.random_numbers import randn_like
from hookdrop.utils.torch_internals import (
    PLAIN_TYPES,
    forward_ad_level,
    functorch_stack,
    on_plain_tensor,
    wraps_results,
)

Edit = Callable[..., Tensor]
"""A function of a gradient and settings that returns the edited gradient."""


def edit_gradient(x: Tensor, edit: Edit, *settings: Any) -> Tensor:
    """Return a copy of `x` whose gradient is passed through `edit`.

    Gradients that reach `x` by other paths are not edited, and the copy may be modified in place.
    """
    if is_compiling():
        return _EditGradient.apply(x, edit, *settings) if torch.is_grad_enabled() and x.requires_grad else x
    # Inside a transform, `requires_grad` does not tell whether a slice needs a gradient.
    if functorch_stack() is not None or forward_ad_level() >= 0:
        y: Tensor = _EditGradientInTransform.apply(x, edit, *settings)
        return y
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    if type(x) not in PLAIN_TYPES and wraps_results(x):
        return on_plain_tensor(edit_gradient, x, edit, *settings)
    edited: Tensor = _EditGradient.apply(x, edit, *settings)
    return edited


class _EditGradient(torch.autograd.Function):
    """Not a tensor hook on a copy: PyTorch 2.6 cannot compile it, and ignores it in `grad` of `vmap`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, edit: Edit, *settings: Any) -> Tensor:
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
    def forward(x: Tensor, edit: Edit, *settings: Any) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.edit, *ctx.settings = inputs

    backward = _EditGradient.backward

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return tangent.clone()


def clip_norm(grad: Tensor, max_norm: float, per_sample: bool) -> Tensor:
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


def scale(grad: Tensor, factor: float | Tensor) -> Tensor:
    """Multiply `grad` by `factor`."""
    if not isinstance(factor, Tensor) and factor != 0.0:
        return grad * factor
    # A factor of 0 also stops infinite gradients. Compare on the gradient's device; `factor` may be on another.
    return torch.where(grad.new_zeros(()) == factor, 0.0, grad * factor)


def add_noise(grad: Tensor, std: float | Tensor) -> Tensor:
    """Add N(0, std^2) to `grad`."""
    # PyTorch 2.6 derives bfloat16 normal numbers from bfloat16 uniform ones, which take only a few values.
    noise = randn_like(grad, torch.promote_types(grad.dtype, torch.float32))
    return (grad + noise * std).to(grad.dtype)

"""Edits of a gradient, and the autograd functions that apply them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from hookdrop.kernels.masking import HALF
from hookdrop.kernels.subclasses import PLAIN, on_plain_tensor, wraps_results
from hookdrop.utils.torch_internals import forward_ad_level, functorch_stack

Edit = Callable[..., Tensor]
"""Takes a gradient and settings, and returns a gradient."""


def edited(x: Tensor, edit: Edit, *settings: Any) -> Tensor:
    """A copy of `x` whose gradient goes through `edit`.

    Gradients that reach `x` elsewhere stay as they are, and the copy may be modified in place.
    """
    if is_compiling():
        return _Edited.apply(x, edit, *settings) if torch.is_grad_enabled() and x.requires_grad else x
    # In a transform, a slice may need a gradient without saying so.
    if functorch_stack() is not None or forward_ad_level() >= 0:
        return _Transformed.apply(x, edit, *settings)  # type: ignore[no-any-return]
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    if type(x) not in PLAIN and wraps_results(x):
        return on_plain_tensor(edited, x, edit, *settings)
    return _Edited.apply(x, edit, *settings)  # type: ignore[no-any-return]


class _Edited(torch.autograd.Function):
    """A tensor hook on a copy would do, but PyTorch 2.6 can't compile it, and ignores it in `grad` of `vmap`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, edit: Edit, *settings: Any) -> Tensor:
        ctx.edit, ctx.settings = edit, settings
        # A view of the input could not be modified in place (pytorch#61519).
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.edit(grad, *ctx.settings), None, *[None] * len(ctx.settings)


class _Transformed(torch.autograd.Function):
    """`_Edited` for `torch.func`, where each slice of a `vmap` has its own gradient, and for forward mode."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, edit: Edit, *settings: Any) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.edit, *ctx.settings = inputs

    backward = _Edited.backward

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return tangent.clone()


def shortened(grad: Tensor, max_norm: float, per_sample: bool) -> Tensor:
    """`grad` scaled down to an L2 norm of at most `max_norm`, as a whole or for each sample."""
    if not grad.numel():
        return grad
    wide = grad.to(torch.float32) if grad.dtype in HALF else grad
    # With an additional last axis the list is never empty, which PyTorch would read as all axes.
    axes = list(range(1 if per_sample else 0, grad.dim() + 1))
    # Squares of large numbers overflow; relative to the largest element they don't.
    largest = wide.detach().abs().unsqueeze(-1).amax(axes, keepdim=True).squeeze(-1)
    # The derivative of a division by 0 would be NaN.
    largest = torch.where(largest == 0.0, 1.0, largest)
    part = wide / largest
    norm: Tensor = torch.linalg.vector_norm(part.unsqueeze(-1), dim=axes, keepdim=True).squeeze(-1)
    short = norm * largest <= max_norm  # False for NaN after an overflow
    return torch.where(short, wide, part * (max_norm / torch.where(short, 1.0, norm))).to(grad.dtype)


def clamped(grad: Tensor, low: float | None, high: float | None) -> Tensor:
    """`grad` clamped to [low, high]."""
    return grad.clamp(low, high)


def scaled(grad: Tensor, factor: float | Tensor) -> Tensor:
    """`grad` times `factor`."""
    if not isinstance(factor, Tensor) and factor != 0.0:
        return grad * factor
    # A factor of 0 stops infinite gradients too. Compare on the gradient's device; `factor` may be on another.
    return torch.where(grad.new_zeros(()) == factor, 0.0, grad * factor)


def noisy(grad: Tensor, std: float | Tensor) -> Tensor:
    """`grad` with N(0, std^2) added."""
    # PyTorch 2.6 makes normal numbers in bfloat16 of uniform ones in bfloat16, of which there are few.
    noise = torch.randn_like(grad, dtype=torch.promote_types(grad.dtype, torch.float32))
    return (grad + noise * std).to(grad.dtype)

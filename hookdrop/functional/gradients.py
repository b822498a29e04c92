"""Edits of the gradient that comes back through one place; forward, nothing changes.

The result is a tensor of its own, so that only the gradient through this place is edited, whoever else uses `x`, and
so that what follows may write in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from hookdrop.functional.rates import HALF, checked_number, checked_rate
from hookdrop.utils.validation import floating, number, one_of

Edit = Callable[..., Tensor]
"""From a gradient, and settings, to a gradient."""


def clip_activation_grad(
    x: Tensor,
    max_norm: float | None = None,
    max_value: float | None = None,
    per_sample: bool = False,
    training: bool = True,
) -> Tensor:
    """`x`, whose gradient is clipped: to an L2 norm of at most `max_norm`, or to [-max_value, max_value].

    Args:
        x: (N, ...), floating point.
        max_norm: above 0; a longer gradient is scaled down to it.
        max_value: above 0; give this or `max_norm`.
        per_sample: the norm is that of each sample (axis 0), and not of the whole tensor.
        training: False returns `x` itself.

    Reference: Pascanu et al. 2013, arXiv:1211.5063, and Graves 2013, arXiv:1308.0850; see `ClipActivationGrad`.
    """
    floating(x, "clip_activation_grad")
    limits = clip_limits(max_norm, max_value, per_sample, "clip_activation_grad")
    if not training:
        return x
    if limits[1] is not None:
        return _edited(x, _clamped, -limits[1], limits[1])
    return _edited(x, _shortened, limits[0], per_sample)


def clamp_activation_grad(
    x: Tensor, min: float | None = None, max: float | None = None, training: bool = True
) -> Tensor:
    """`x`, whose gradient is clamped to [min, max], element by element; None is no limit.

    Reference: Graves 2013, arXiv:1308.0850, section 2.1.
    """
    floating(x, "clamp_activation_grad")
    low, high = clamp_limits(min, max, "clamp_activation_grad")
    return _edited(x, _clamped, low, high) if training else x


def scale_activation_grad(x: Tensor, factor: float | Tensor, training: bool = True) -> Tensor:
    """`x`, whose gradient is multiplied by `factor`: 0 stops it, -1 reverses it, 1 returns `x` itself.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> scale_activation_grad(x, -1.0).sum().backward()
        >>> x.grad
        tensor([-1., -1.])

    Reference: Ganin & Lempitsky 2015, arXiv:1409.7495 (gradient reversal).
    """
    floating(x, "scale_activation_grad")
    factor = checked_number(factor, "factor", "scale_activation_grad")
    idle = not isinstance(factor, Tensor) and factor == 1.0
    return x if idle or not training else _edited(x, _scaled, factor)


def noise_activation_grad(x: Tensor, std: float | Tensor, training: bool = True) -> Tensor:
    """`x`, to whose gradient N(0, std^2) is added, drawn in the backward pass.

    Reference: Neelakantan et al. 2015, arXiv:1511.06807, for the gradients of parameters.
    """
    floating(x, "noise_activation_grad")
    std = checked_rate(std, "std", "noise_activation_grad", torch.inf)
    idle = not isinstance(std, Tensor) and std == 0.0
    return x if idle or not training else _edited(x, _noisy, std)


def clip_limits(
    max_norm: object, max_value: object, per_sample: object, owner: str
) -> tuple[float | None, float | None, bool]:
    """The limits of a clip, checked: exactly one of the first two is a number."""
    if (max_norm is None) == (max_value is None):
        given = "neither" if max_norm is None else f"both (max_norm={max_norm!r}, max_value={max_value!r})"
        raise TypeError(f"{owner}: give max_norm or max_value, got {given}.\n  as in {owner}(max_norm=1.0)")
    one_of(per_sample, "per_sample", owner, (True, False))
    if max_value is not None and per_sample:
        raise ValueError(
            f"{owner}: per_sample=True says whose norm is clipped, and max_value clips each element by itself.\n"
            "  leave out per_sample, or give max_norm."
        )
    limits = [None if value is None else number(value, name, owner)
              for name, value in (("max_norm", max_norm), ("max_value", max_value))]  # fmt: skip
    for name, value in zip(("max_norm", "max_value"), limits, strict=True):
        if value is not None and value <= 0.0:
            raise ValueError(
                f"{owner}: {name} must be above 0, got {value:g}.\n  to stop the gradient: ScaleActivationGrad(0)"
            )
    return limits[0], limits[1], bool(per_sample)


def clamp_limits(low: object, high: object, owner: str) -> tuple[float | None, float | None]:
    """The limits of a clamp, checked: at least one is a number."""
    if low is None and high is None:
        raise TypeError(f"{owner}: give min, max or both, as in {owner}(min=-1.0, max=1.0).")
    least = None if low is None else number(low, "min", owner)
    most = None if high is None else number(high, "max", owner)
    if least is not None and most is not None and least > most:
        raise ValueError(f"{owner}: min must not be above max, got min={least:g} and max={most:g}.")
    return least, most


def _edited(x: Tensor, edit: Edit, *settings: Any) -> Tensor:
    if not torch.compiler.is_compiling() and _is_transformed():
        return _Transformed.apply(x, edit, *settings)  # type: ignore[no-any-return]
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    return _Edited.apply(x, edit, *settings)  # type: ignore[no-any-return]


def _is_transformed() -> bool:
    # There a tensor may need a gradient that does not say so: a slice of one that does.
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


class _Edited(torch.autograd.Function):
    """A tensor hook on a copy does the same, but PyTorch 2.6 can't compile it, nor see it in `grad` of `vmap`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, edit: Edit, *settings: Any) -> Tensor:
        ctx.edit, ctx.settings = edit, settings
        # Returned as a view of itself it could not be written to in place (pytorch#61519).
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.edit(grad, *ctx.settings), None, *[None] * len(ctx.settings)


class _Transformed(torch.autograd.Function):
    """The same for `torch.func`, where each slice of a `vmap` has a gradient of its own, and for forward mode."""

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


def _shortened(grad: Tensor, max_norm: float, per_sample: bool) -> Tensor:
    if not grad.numel():
        return grad
    wide = grad.to(torch.float32) if grad.dtype in HALF else grad
    # Another axis at the end: given none to sum over, PyTorch would sum over all.
    axes = list(range(1 if per_sample else 0, grad.dim() + 1))
    # The squares of large numbers overflow, and their sum may: held against the largest of them none does.
    largest = wide.detach().abs().unsqueeze(-1).amax(axes, keepdim=True).squeeze(-1)
    # Never a division by 0, whose derivative would be no number.
    largest = torch.where(largest == 0.0, 1.0, largest)
    part = wide / largest
    norm: Tensor = torch.linalg.vector_norm(part.unsqueeze(-1), dim=axes, keepdim=True).squeeze(-1)
    short = norm * largest <= max_norm  # not so where an overflow made it no number
    return torch.where(short, wide, part * (max_norm / torch.where(short, 1.0, norm))).to(grad.dtype)


def _clamped(grad: Tensor, low: float | None, high: float | None) -> Tensor:
    return grad.clamp(low, high)


def _scaled(grad: Tensor, factor: float | Tensor) -> Tensor:
    if not isinstance(factor, Tensor) and factor != 0.0:
        return grad * factor
    # 0 stops what is infinite too. Compared on the gradient's device, which `factor` may not be on.
    return torch.where(grad.new_zeros(()) == factor, 0.0, grad * factor)


def _noisy(grad: Tensor, std: float | Tensor) -> Tensor:
    # PyTorch 2.6 draws normal numbers in bfloat16 from uniform ones in bfloat16, of which there are few.
    noise = torch.randn_like(grad, dtype=torch.promote_types(grad.dtype, torch.float32))
    return (grad + noise * std).to(grad.dtype)

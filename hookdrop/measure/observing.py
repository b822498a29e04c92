"""What is observed of a regularizer that runs: its input, its output, and which elements it drops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hookdrop.core.errors import InjectionError
from hookdrop.core.sink import RateSink
from hookdrop.core.torch_internals import functorch_stack
from hookdrop.survey.isolation import forked_rng

Record: TypeAlias = Callable[[RateSink, float | None, Tensor, Tensor, Tensor | None], None]
"""Receives (sink, rate, input, output, dropped) of each tensor that a regularizer processes. The rate is None if the
regularizer has none; `dropped` is True where the output does not depend on the input, or None if no element is dropped.
"""


def dropped_elements(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return where the result of `fn` does not depend on `x`, and leave the RNG state."""
    # Hide these saved tensors from a surrounding activation checkpoint, which counts them.
    uncounted = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    with forked_rng(x), torch.inference_mode(False), torch.enable_grad(), uncounted:
        twin = x.detach().clone().requires_grad_()
        out = fn(twin)
        grad = torch.autograd.grad(out.sum(), twin, allow_unused=True)[0] if out.requires_grad else None
    return torch.ones_like(x, dtype=torch.bool) if grad is None else grad == 0


def total(x: Any) -> float:
    """Convert a number to a float, summed over all ranks: a sum over a `DTensor` is partial on each rank."""
    return float(x.full_tensor() if hasattr(x, "full_tensor") else x)


def require_values(x: Tensor) -> None:
    """Raise `InjectionError` if a tensor has no values: on the meta device, or in a transform of `torch.func`."""
    if functorch_stack() is not None:
        raise InjectionError(
            "recording and probe cannot be used inside torch.func (vmap, grad, ...), where tensors have no values.\n"
            "  record a forward outside of it"
        )
    if x.is_meta:
        raise InjectionError(
            "tensors on the meta device have no values, so nothing can be measured.\n"
            '  first materialize the model: model.to_empty(device="cpu"), then load its weights'
        )

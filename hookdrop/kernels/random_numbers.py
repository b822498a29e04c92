"""Random numbers for eager and compiled code.

Compiled code fuses random functions with the operations around them. In two cases that is wrong (see
`recomputes_forward` and `has_faulty_random_kernels`), and the numbers come from an operator that cannot be fused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from hookdrop.errors import InjectionError
from hookdrop.utils.torch_internals import (
    can_replay_random_operators,
    disable_dynamo,
    has_faulty_random_kernels,
    recomputes_forward,
)


def rand(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.rand`."""
    if _must_not_fuse(device):
        return _unfused("rand", shape, dtype, device)
    return torch.rand(tuple(shape), dtype=dtype, device=device)


def rand_like(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`torch.rand_like`, in any memory format."""
    if _must_not_fuse(x.device):
        return _unfused("rand", x.shape, dtype, x.device)
    return torch.rand_like(x, dtype=dtype)


def randn_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`torch.randn_like`, in any memory format."""
    if _must_not_fuse(x.device):
        return _unfused("randn", x.shape, dtype or x.dtype, x.device)
    return torch.randn_like(x, dtype=dtype)


def randint(high: int, shape: Sequence[int], device: torch.device) -> Tensor:
    """`torch.randint`."""
    if _must_not_fuse(device):
        return _unfused("randint", shape, torch.int64, device, high)
    return torch.randint(high, tuple(shape), device=device)


def replayed(operator: Callable[..., Any], *args: Any, **settings: Any) -> Any:
    """Call a random operator. If compiled code recomputes it in the backward pass, the result is the same."""
    if not (is_compiling() and recomputes_forward()):
        return operator(*args, **settings)
    if not can_replay_random_operators():
        # Under fullgraph, PyTorch shows this error. Otherwise, it runs the code uncompiled, which is right.
        raise InjectionError(
            "with an activation_memory_budget below 1, compiled code draws again in the backward pass. PyTorch cannot "
            "repeat the draws of the forward pass before version 2.11, or inside torch.func transforms.\n"
            "  set torch._functorch.config.activation_memory_budget = 1, or remove fullgraph=True."
        )
    from torch.utils.checkpoint import checkpoint

    # Inside a checkpoint, PyTorch saves the RNG state of the forward pass.
    return checkpoint(lambda: operator(*args, **settings), use_reentrant=False)


def _must_not_fuse(device: torch.device) -> bool:
    return is_compiling() and (recomputes_forward() or (device.type == "cuda" and has_faulty_random_kernels()))


def _unfused(kind: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device, high: int = 0) -> Tensor:
    numbers: Tensor = replayed(_NUMBERS, kind, high, shape, dtype=dtype, device=device)
    return numbers


def _numbers(kind: str, high: int, size: list[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    if kind == "randint":
        return torch.randint(high, size, dtype=dtype, device=device)
    return (torch.rand if kind == "rand" else torch.randn)(size, dtype=dtype, device=device)


def _numbers_fake(kind: str, high: int, size: list[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=dtype, device=device)


_NAME = "hookdrop::random_numbers"
# PyTorch finds the device of an operator without tensors only in a keyword argument.
_SCHEMA = "(str kind, SymInt high, SymInt[] size, *, ScalarType dtype, Device device) -> Tensor"
torch.library.define(_NAME, _SCHEMA, tags=torch.Tag.nondeterministic_seeded)
torch.library.impl(_NAME, "default")(disable_dynamo(_numbers))
torch.library.register_fake(_NAME)(_numbers_fake)
_NUMBERS = torch.ops.hookdrop.random_numbers.default

"""Random numbers for eager and compiled code, and Bernoulli trials that need less than one random number each.

Compiled code fuses random functions with the operations around them. In two cases that is wrong (see
`recomputes_forward` and `has_faulty_random_kernels`), and the numbers come from an operator that cannot be fused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_compiling

from hookdrop.core import torch_internals as internals
from hookdrop.core.errors import InjectionError
from hookdrop.kernels.accelerators import ACCELERATORS

Drawn = TypeVar("Drawn")


def rand(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.rand`."""
    return _random("rand", 0, shape, dtype, device)


def randint(high: int, shape: Sequence[int], device: torch.device) -> Tensor:
    """`torch.randint`."""
    return _random("randint", high, shape, torch.int64, device)


def rand_like(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`torch.rand_like`, in any memory format."""
    return rand(x.shape, dtype, x.device) if _must_not_fuse(x.device) else torch.rand_like(x, dtype=dtype)


def randn_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`torch.randn_like`, in any memory format."""
    if _must_not_fuse(x.device):
        return _random("randn", 0, x.shape, dtype or x.dtype, x.device)
    return torch.randn_like(x, dtype=dtype)


def _random(kind: str, high: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    if not _must_not_fuse(device):
        return _numbers(kind, high, tuple(shape), dtype=dtype, device=device)
    return replayed(_NUMBERS, kind, high, shape, dtype=dtype, device=device)


def replayed(operator: Callable[..., Drawn], *args: Any, **settings: Any) -> Drawn:
    """Call a random operator. If compiled code recomputes it in the backward pass, the result is the same."""
    if not (is_compiling() and internals.recomputes_forward()):
        return operator(*args, **settings)
    if not internals.can_replay_random_operators():
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
    if not is_compiling():
        return False
    return internals.recomputes_forward() or (device.type == "cuda" and internals.has_faulty_random_kernels())


def _numbers(kind: str, high: int, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    if kind == "randint":
        return torch.randint(high, size, dtype=dtype, device=device)
    return (torch.rand if kind == "rand" else torch.randn)(size, dtype=dtype, device=device)


def operator(schema: str, function: Callable[..., Any], fake: Callable[..., Any], *tags: torch.Tag) -> Any:
    """Register `function` as an operator that the compiler does not trace into, with its meta implementation."""
    name = schema.partition("(")[0]
    torch.library.define(f"hookdrop::{name}", schema.removeprefix(name), tags=tags)
    torch.library.impl(f"hookdrop::{name}", "default")(internals.disable_dynamo(function))
    torch.library.register_fake(f"hookdrop::{name}")(fake)
    return getattr(torch.ops.hookdrop, name).default


_NUMBERS: Callable[..., Tensor] = operator(
    # PyTorch finds the device of an operator without tensors only in a keyword argument.
    "random_numbers(str kind, SymInt high, SymInt[] size, *, ScalarType dtype, Device device) -> Tensor",
    _numbers,
    lambda kind, high, size, *, dtype, device: torch.empty(size, dtype=dtype, device=device),
    torch.Tag.nondeterministic_seeded,
)


# --- Bernoulli trials
#
# Both samplers are exact: the trials are independent and succeed with probability p, up to the resolution of the
# uniform numbers: 53 bits, or 24 bits on a device without float64.


def successes(trials: int, p: float, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return the sorted indices, in `dtype`, of the successes among `trials` Bernoulli(p) trials, p in [0, 1).

    Only the successes are drawn: the gaps between them are geometric, and a geometric number is the floor of an
    exponential one (Devroye, "Non-Uniform Random Variate Generation", 1986, X.2).
    """
    if p == 0.0 or trials == 0:
        return torch.empty(0, dtype=dtype, device=device)
    batch = int(trials * p + 8.0 * math.sqrt(trials * p) + 16.0)
    logs = _logs(batch, device)
    found_at = ACCELERATORS[device].successes(logs, math.log1p(-p), trials, dtype)
    if found_at is not None:
        return found_at
    at = _gaps(logs, p).cumsum_(0)
    while (found := int(torch.count_nonzero(at <= trials))) == len(at):
        at = torch.cat([at, _gaps(_logs(batch, device), p).cumsum_(0).add_(at[-1])])
    return at[:found].sub_(1.0).to(dtype)


def trials(count: int, p: float, device: torch.device, *, static: bool) -> Tensor:
    """Draw `count` Bernoulli(p) trials as uint8, 1 for a success.

    A random byte below floor(256 p) is a success, and one random number provides eight bytes. `successes` draws the
    remainder of p, which is less than 1/256. With `static`, which forbids synchronization, PyTorch draws all trials.
    """
    if static:
        return torch.empty(count, dtype=torch.bool, device=device).bernoulli_(p).view(torch.uint8)
    level = math.floor(p * 256.0)
    result = _bytes_below(level, count, device)
    rest = (p - level / 256.0) / (1.0 - level / 256.0) if level < 256 else 0.0
    return result.index_fill_(0, successes(count, rest, device), 1)


def most_precise_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def kept_scale(count: int, dropped: Tensor, rank: int) -> Tensor:
    """Return count / kept count, given the number of dropped elements: 0-d, or one per sample of a tensor."""
    kept = (count - dropped).clamp(min=1).to(most_precise_dtype(dropped.device))
    # `number / tensor` multiplies by the reciprocal in PyTorch, which rounds twice.
    scale = torch.full_like(kept, count) / kept
    return scale.view(-1, *[1] * (rank - 1)) if scale.dim() else scale


def _logs(count: int, device: torch.device) -> Tensor:
    """Logarithms of uniform numbers below 1, so that none is 0."""
    return torch.rand(count, dtype=most_precise_dtype(device), device=device).log_()


def _gaps(logs: Tensor, p: float) -> Tensor:
    """Geometric numbers, at least 1, as whole floats or inf. Overwrites `logs`."""
    return logs.div_(math.log1p(-p)).ceil_()


def _bytes_below(level: int, count: int, device: torch.device) -> Tensor:
    """Draw `count` random bytes and return 1 where they are below `level` (0 to 256), else 0."""
    if level in (0, 256):
        return torch.full((count,), level // 256, dtype=torch.uint8, device=device)
    words = torch.randint(-(2**63), 2**63 - 1, (-(-count // 8),), device=device)
    # Comparing bytes takes ten times longer than clamping them.
    return words.view(torch.uint8)[:count].clamp_(level - 1, level).neg_().add_(level)

"""Bernoulli trials, drawn at less than the price of one random number each.

Nothing here is approximate: both samplers give independent trials of probability p, to the resolution of the
uniform numbers that they start from: 53 bits, or 24 on a device that has no float64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def successes(trials: int, p: float, device: torch.device, *, static: bool, dtype: torch.dtype = torch.int64) -> Tensor:
    """Which of `trials` Bernoulli(p) trials succeed, in order.

    The gaps between successes are geometric, and a geometric number is the floor of an exponential one
    (Devroye, "Non-Uniform Random Variate Generation", 1986, X.2): only the successes are drawn.

    Args:
        trials: how many.
        p: in [0, 1).
        device: where the result lives.
        static: the result's length depends on `trials` and `p` alone and nothing waits for the device; it is
            filled up with the last success. Wants `trials * p` of at least `ENOUGH`, since no success at all can't
            be told that way.
        dtype: of the result, large enough for `trials`.
    """
    if p == 0.0 or trials == 0:
        return torch.empty(0, dtype=dtype, device=device)
    batch = int(trials * p + 8.0 * math.sqrt(trials * p) + 16.0)
    if static:
        at = _gaps(batch, p, device).clamp_(max=_FAR).long().cumsum_(0)
        good = at <= trials
        return torch.where(good, at, (at * good).amax()).sub_(1).clamp_(min=0).to(dtype)
    at = _walk(batch, p, device)
    while (there := int(torch.count_nonzero(at <= trials))) == len(at):
        at = torch.cat([at, _walk(batch, p, device).add_(at[-1])])
    return at[:there].sub_(1.0).to(dtype)


ENOUGH = 40.0
"""Expected successes above which none at all is a matter of 1e-17."""


def trials(count: int, p: float, device: torch.device, *, static: bool) -> Tensor:
    """`count` Bernoulli(p) trials: uint8, 1 for a success.

    A random byte below floor(256 p) decides nearly all of it, eight of them to a random number, and what is left of
    p, less than 1/256, is drawn by its successes; `static` ones, which may wait for nothing, are PyTorch's own.
    """
    if static:
        return torch.empty(count, dtype=torch.bool, device=device).bernoulli_(p).view(torch.uint8)
    level = math.floor(p * 256.0)
    result = _bytes_below(level, count, device)
    rest = (p - level / 256.0) / (1.0 - level / 256.0) if level < 256 else 0.0
    return result.index_fill_(0, successes(count, rest, device, static=False), 1)


def finest(device: torch.device) -> torch.dtype:
    """The finest floating dtype that the device has."""
    return torch.float32 if device.type == "mps" else torch.float64


def _walk(steps: int, p: float, device: torch.device) -> Tensor:
    """The numbers, from 1 on, of the first successes in an endless row of trials: whole, or infinite."""
    return _gaps(steps, p, device).cumsum_(0)


def _gaps(steps: int, p: float, device: torch.device) -> Tensor:
    """Geometric numbers, from 1 on. A uniform number below 1 has a logarithm below 0, so that none is 0."""
    return torch.rand(steps, dtype=finest(device), device=device).log_().div_(math.log1p(-p)).ceil_()


_FAR = 2.0**40
"""Past the last trial of all tensors, and small enough that sums of it don't overflow."""


def _bytes_below(level: int, count: int, device: torch.device) -> Tensor:
    """`count` random bytes: 1 where below `level`, in 0 to 256, else 0."""
    if level == 0:
        return torch.zeros(count, dtype=torch.uint8, device=device)
    if level == 256:
        return torch.ones(count, dtype=torch.uint8, device=device)
    words = torch.randint(-(2**63), 2**63 - 1, (-(-count // 8),), device=device)
    # Comparing bytes is ten times slower than clamping them.
    return words.view(torch.uint8)[:count].clamp_(level - 1, level).neg_().add_(level)

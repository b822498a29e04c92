"""Bernoulli trials at a cost of less than one random number each.

Both samplers are exact: their trials are independent and have probability p to the resolution of the uniform numbers
that they use: 53 bits, or 24 on a device without float64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def successes(trials: int, p: float, device: torch.device, *, static: bool, dtype: torch.dtype = torch.int64) -> Tensor:
    """The sorted indices of the successes among `trials` Bernoulli(p) trials.

    The gaps between successes are geometric, and a geometric number is the floor of an exponential one (Devroye,
    "Non-Uniform Random Variate Generation", 1986, X.2), so this draws only the successes.

    Args:
        trials: how many.
        p: in [0, 1).
        device: of the result.
        static: makes the length of the result depend on `trials` and `p` alone, without synchronization: the last
            success repeats. It requires `trials * p` of at least `ENOUGH`, as it can't return no success at all.
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
"""Expected successes from which no success at all has a probability of 1e-17."""


def trials(count: int, p: float, device: torch.device, *, static: bool) -> Tensor:
    """`count` Bernoulli(p) trials: uint8, 1 for a success.

    A random byte below floor(256 p) is a success; one random number provides eight bytes. `successes` draws the
    rest of p, less than 1/256. If `static`, which forbids synchronization, PyTorch draws all trials.
    """
    if static:
        return torch.empty(count, dtype=torch.bool, device=device).bernoulli_(p).view(torch.uint8)
    level = math.floor(p * 256.0)
    result = _bytes_below(level, count, device)
    rest = (p - level / 256.0) / (1.0 - level / 256.0) if level < 256 else 0.0
    return result.index_fill_(0, successes(count, rest, device, static=False), 1)


def finest(device: torch.device) -> torch.dtype:
    """The most precise floating-point dtype of the device."""
    return torch.float32 if device.type == "mps" else torch.float64


def _walk(steps: int, p: float, device: torch.device) -> Tensor:
    """The positions, from 1 on, of the first successes in endless trials: whole numbers, or infinity."""
    return _gaps(steps, p, device).cumsum_(0)


def _gaps(steps: int, p: float, device: torch.device) -> Tensor:
    """Geometric numbers, from 1 on: none is 0, as the logarithm of a uniform number below 1 is below 0."""
    return torch.rand(steps, dtype=finest(device), device=device).log_().div_(math.log1p(-p)).ceil_()


_FAR = 2.0**40
"""Above the number of trials of any tensor, and small enough that sums of it don't overflow."""


def _bytes_below(level: int, count: int, device: torch.device) -> Tensor:
    """`count` random bytes: 1 where below `level`, in 0 to 256, else 0."""
    if level == 0:
        return torch.zeros(count, dtype=torch.uint8, device=device)
    if level == 256:
        return torch.ones(count, dtype=torch.uint8, device=device)
    words = torch.randint(-(2**63), 2**63 - 1, (-(-count // 8),), device=device)
    # Comparing bytes takes ten times as long as clamping them.
    return words.view(torch.uint8)[:count].clamp_(level - 1, level).neg_().add_(level)

"""Bernoulli trials that need less than one random number each.

Both samplers are exact: the trials are independent and succeed with probability p, up to the resolution of the uniform
numbers: 53 bits, or 24 bits on a device without float64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hookdrop.kernels import native


def successes(trials: int, p: float, device: torch.device, *, static: bool, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return the sorted indices of the successes among `trials` Bernoulli(p) trials.

    Only the successes are drawn: the gaps between them are geometric, and a geometric number is the floor of an
    exponential one (Devroye, "Non-Uniform Random Variate Generation", 1986, X.2).

    Args:
        trials: number of trials.
        p: probability of a success, in [0, 1).
        device: device of the result.
        static: whether the length of the result depends only on `trials` and `p`, which avoids a synchronization. The
            last success is repeated as padding. `trials * p` must be at least `MIN_EXPECTED_SUCCESSES`, because an
            empty result is impossible.
        dtype: integer dtype of the result, large enough for `trials`.
    """
    if p == 0.0 or trials == 0:
        return torch.empty(0, dtype=dtype, device=device)
    batch = int(trials * p + 8.0 * math.sqrt(trials * p) + 16.0)
    if static:
        at = _gaps(_logs(batch, device), p).clamp_(max=_MAX_GAP).long().cumsum_(0)
        good = at <= trials
        return torch.where(good, at, (at * good).amax()).sub_(1).clamp_(min=0).to(dtype)
    logs = _logs(batch, device)
    if (found_at := native.success_positions(logs, math.log1p(-p), trials, dtype)) is not None:
        return found_at
    at = _gaps(logs, p).cumsum_(0)
    while (found := int(torch.count_nonzero(at <= trials))) == len(at):
        at = torch.cat([at, _gaps(_logs(batch, device), p).cumsum_(0).add_(at[-1])])
    return at[:found].sub_(1.0).to(dtype)


MIN_EXPECTED_SUCCESSES = 40.0
"""With this many expected successes, the probability of no success at all is below 1e-17."""


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
    return result.index_fill_(0, successes(count, rest, device, static=False), 1)


def most_precise_dtype(device: torch.device) -> torch.dtype:
    """The most precise floating-point dtype of the device."""
    return torch.float32 if device.type == "mps" else torch.float64


def _logs(count: int, device: torch.device) -> Tensor:
    """Logarithms of uniform numbers below 1, so that none is 0."""
    return torch.rand(count, dtype=most_precise_dtype(device), device=device).log_()


def _gaps(logs: Tensor, p: float) -> Tensor:
    """Geometric numbers, at least 1, as whole floats or inf. Overwrites `logs`."""
    return logs.div_(math.log1p(-p)).ceil_()


_MAX_GAP = 2.0**40
"""Larger than any tensor's number of trials, and small enough that sums do not overflow."""


def _bytes_below(level: int, count: int, device: torch.device) -> Tensor:
    """Draw `count` random bytes and return 1 where they are below `level` (0 to 256), else 0."""
    if level == 0:
        return torch.zeros(count, dtype=torch.uint8, device=device)
    if level == 256:
        return torch.ones(count, dtype=torch.uint8, device=device)
    words = torch.randint(-(2**63), 2**63 - 1, (-(-count // 8),), device=device)
    # Comparing bytes takes ten times longer than clamping them.
    return words.view(torch.uint8)[:count].clamp_(level - 1, level).neg_().add_(level)

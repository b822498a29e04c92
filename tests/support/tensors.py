"""Comparison of lists of tensors."""

from __future__ import annotations

import torch


def all_equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    """Whether both lists have equal tensors, bit for bit."""
    return len(a) == len(b) and all(torch.equal(s, t) for s, t in zip(a, b, strict=True))

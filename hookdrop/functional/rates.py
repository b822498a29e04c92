"""Rates as the functions are given them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hookdrop.utils.validation import number, rate

HALF = (torch.float16, torch.bfloat16)


def checked_rate(p: float | Tensor, *args: Any, **kwargs: Any) -> float | Tensor:
    """`p` checked, as a float; in compiled code as a 0-d tensor."""
    if not torch.compiler.is_compiling():
        return rate(p, *args, **kwargs)
    return p if isinstance(p, Tensor) else torch.tensor(rate(p, *args, **kwargs), dtype=torch.float64, device="cpu")


def checked_number(value: float | Tensor, name: str, owner: str) -> float | Tensor:
    """The same for a rate that may be any finite number."""
    if not torch.compiler.is_compiling():
        return number(value, name, owner)
    return (
        value
        if isinstance(value, Tensor)
        else torch.tensor(number(value, name, owner), dtype=torch.float64, device="cpu")
    )

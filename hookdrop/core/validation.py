"""Argument validation. Each function returns the valid value or raises an error that shows what to write instead."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hookdrop.core.errors import ShapeError

CopyDevice = torch.device | str | None  # the device of copies; None is the device of the tensor


def number(value: object, name: str, owner: str) -> float:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if type(value).__name__ in ("bool", "bool_", "str", "bytes") or not hasattr(value, "__float__"):
        raise TypeError(f"{owner}: {name} must be a number, got {value!r} ({type(value).__name__}).")
    try:
        result = float(value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{owner}: {name} must be a single number, got {value!r}.") from None
    if not -math.inf < result < math.inf:  # unlike `math.isfinite`, the compiler can trace this
        raise ValueError(f"{owner}: {name} must be finite, got {result}.")
    return result


def positive(value: object, name: str, owner: str, hint: str = "") -> float:
    result = number(value, name, owner)
    if result <= 0.0:
        raise ValueError(f"{owner}: {name} must be above 0, got {result:g}.{hint}")
    return result


def rate(value: object, name: str, owner: str, high: float = 1.0, *, low: float = 0.0, open_end: bool = False) -> float:
    """Return `value` as a finite float in [low, high], or in [low, high) if `open_end`."""
    result = number(value, name, owner)
    if low <= result < high or (result == high and not open_end):
        return result
    span = f"{'[' if low > -math.inf else '('}{low:g}, {high:g}{')' if open_end or high == math.inf else ']'}"
    hint = f"\n  a percentage? write {name}={result / 100:g}" if high == 1.0 and 2 <= result <= 100 else ""
    raise ValueError(f"{owner}: {name} must lie in {span}, got {result:g}.{hint}")


def as_rate_tensor(rate: float) -> Tensor:
    """Return `rate` as a 0-d CPU tensor, which acts as a scalar on every device and in compiled code."""
    return torch.tensor(rate, dtype=torch.float64, device="cpu")


def count(value: Any, name: str, owner: str, low: int = 1) -> int:
    """Return `value` as a Python int of at least `low`."""
    try:
        if isinstance(value, bool):
            raise TypeError
        result = operator.index(value)
    except TypeError:
        hint = f"\n  write {name}={int(value)}" if isinstance(value, float) and math.isfinite(value) else ""
        raise TypeError(f"{owner}: {name} must be an integer, got {value!r} ({type(value).__name__}).{hint}") from None
    if result < low:
        raise ValueError(f"{owner}: {name} must be at least {low}, got {result}.")
    return result


def given_channel_axis(shape: Sequence[int], channel_dim: object, owner: str) -> int:
    """Return `channel_dim`, which may count from the end, as an axis other than the first."""
    rank, axis = len(shape), count(channel_dim, "channel_dim", owner, -5)
    if not -rank < axis < rank or axis == 0:
        raise ShapeError(f"got {tuple(shape)}: channel_dim={axis} is not one of its axes 1 to {rank - 1}.")
    return axis % rank


def one_of(value: object, name: str, owner: str, allowed: tuple[object, ...]) -> Any:
    for choice in allowed:
        if value is choice or (type(value) is type(choice) and value == choice):
            return value
    raise ValueError(f"{owner}: {name} must be one of {', '.join(map(repr, allowed))}, got {value!r}.")


_SUPPORTED_DTYPES = frozenset((torch.float32, torch.float64, torch.float16, torch.bfloat16))


def floating(x: object, owner: str, *, nested: bool = False) -> None:
    """Raise `TypeError` unless `x` is a dense tensor with a real floating-point dtype."""
    if isinstance(x, Tensor) and x.dtype in _SUPPORTED_DTYPES and x.layout is torch.strided and not x.is_nested:
        return
    if not isinstance(x, Tensor):
        text = repr(x)
        raise TypeError(
            f"{owner}: x must be a tensor, got {text if len(text) < 60 else text[:57] + '...'} ({type(x).__name__}).\n"
            "  write torch.as_tensor(x, dtype=torch.float32)"
        )
    instead = ""
    if x.layout not in (torch.strided, torch.jagged):
        instead = "x.to_dense()"
    elif x.is_nested and not nested:
        instead = "a padded tensor: torch.nested.to_padded_tensor(x, 0.0)"
    elif x.is_complex():
        instead = "its real and imaginary parts: torch.view_as_real(x)"
    elif not x.is_floating_point():
        instead = "x.float()"
    elif x.element_size() < 2:
        instead = "x.to(torch.bfloat16): PyTorch has no arithmetic for 8-bit floats"
    if instead:
        what = "nested" if x.is_nested else f"{x.layout} {tuple(x.shape)}" if "dense" in instead else tuple(x.shape)
        raise TypeError(f"{owner}: x must be a dense floating-point tensor, got {what} {x.dtype}.\n  pass {instead}")

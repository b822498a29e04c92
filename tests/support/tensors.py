"""Comparison, measurement and creation of tensors."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hookdrop.kernels.accelerators import ACCELERATORS, Accelerator

HALF = [torch.bfloat16, torch.float16]
"""Low-precision dtypes."""

X = torch.ones(40_000)
"""Enough elements to measure a rate."""


def all_equal(a: list[Tensor], b: list[Tensor]) -> bool:
    """Whether both lists have equal tensors, bit for bit."""
    return len(a) == len(b) and all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


def zero_fraction(y: Tensor) -> float:
    return (y == 0).float().mean().item()


def zeroed(model: nn.Module, x: Tensor = X) -> float:
    """The fraction of zeros in the output."""
    with torch.no_grad():
        return zero_fraction(model(x))


def within(found: Tensor, expected: float, spread: float, draws: float) -> bool:
    """Whether a mean over `draws` draws with standard deviation `spread` is within 4 standard errors."""
    return abs(found.double().item() - expected) <= 4 * spread / math.sqrt(draws) + 1e-12


def styled(n: int = 6, channels: int = 3, size: int = 5, dtype: torch.dtype = torch.float32) -> Tensor:
    scaled = torch.randn(n, channels, size, size) * (1 + torch.rand(n, channels, 1, 1))
    return (scaled + torch.arange(n).view(-1, 1, 1, 1)).to(dtype)


def dilated(corners: Tensor, edges: tuple[int, ...]) -> Tensor:
    """The union of the blocks with these corners: bool (N, C, *valid) becomes bool (N, C, *sizes)."""
    for axis, edge in enumerate(edges, start=2):
        count = corners.shape[axis]
        union = torch.zeros(*corners.shape[:axis], count + edge - 1, *corners.shape[axis + 1 :], dtype=torch.bool)
        for step in range(edge):
            union.narrow(axis, step, count).logical_or_(corners)
        corners = union
    return corners


def scale_maps(maps: Tensor) -> Tensor:
    """Scale each map to [0, 1], as pytorch-grad-cam does."""
    low, high = maps.amin((1, 2), keepdim=True), maps.amax((1, 2), keepdim=True)
    return (maps - low) / (high - low + 1e-7)


class Operations(TorchDispatchMode):
    """The names of all operations except views and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and not func.overloadpacket.__name__.startswith("empty"):
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def accelerate(patch: pytest.MonkeyPatch, device: str, accelerator: Accelerator | None = None) -> None:
    """Use this code on a type of device; by default, PyTorch operations alone."""
    for name in (device, f"{device}:0"):
        patch.setitem(ACCELERATORS, torch.device(name), accelerator or Accelerator())

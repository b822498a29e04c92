"""One of each regularizer with a shape for it: for tests that hold for all of them.

A regularizer that is called as `Dropout(0.3)` and takes `Case.shape` needs no entry in the table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from hookdrop import (
    ClampActivationGrad,
    ClipActivationGrad,
    Cutout,
    DropBlock,
    Dropout,
    Dropout1d,
    Dropout3d,
    DropPath,
    LockedDropout,
    MixStyle,
    NoiseActivationGrad,
    ScaleActivationGrad,
    TokenDropout,
)
from hookdrop.regularizers import REGULARIZERS


class Affine(nn.Module):
    """A weight and a bias for each element of a sample, so that gradients show a mask element by element."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.5 + torch.rand(shape, dtype=dtype))
        self.bias = nn.Parameter(torch.randn(shape, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + self.bias


@dataclass(frozen=True)
class Case:
    """A regularizer and a shape that it takes."""

    regularizer: nn.Module
    shape: tuple[int, ...] = (4, 6, 8, 8)
    derives: bool = True
    """Whether the gradient is the derivative of the output, as it is not where parts of it are constants, or edited."""

    @property
    def in_backward(self) -> bool:
        """Whether it edits gradients, so that nothing is drawn in a forward and its output is its input."""
        return getattr(self.regularizer, "in_backward", False)

    @property
    def has_a_rate(self) -> bool:
        """Whether a schedule can drive it."""
        return getattr(self.regularizer, "rate_name", "p") is not None

    def input(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(self.shape, dtype=dtype)

    def model(self, dtype: torch.dtype = torch.float32) -> nn.Sequential:
        """Without hooks: they belong on "0" and "2"."""
        inner = self.shape[1:]
        return nn.Sequential(Affine(inner, dtype), nn.Tanh(), Affine(inner, dtype), nn.Sigmoid())


SITES = ["0", "2"]
_CASES = {
    "Dropout of many": Case(Dropout(0.3), (4, 8, 32, 32)),  # from 2**15 elements on it is our own
    "Dropout1d": Case(Dropout1d(0.3), (4, 6, 8)),
    "Dropout3d": Case(Dropout3d(0.3), (4, 6, 4, 4, 4)),
    "DropBlock by seeds": Case(DropBlock(0.3, 3)),
    "DropBlock by masks": Case(DropBlock(0.9, 3)),
    "DropBlock, one mask for all channels": Case(DropBlock(0.3, 3, per_channel=False, normalize="sample")),
    "DropBlock in 1d": Case(DropBlock(0.3, 3, channel_dim=1), (4, 6, 16)),
    "DropBlock in 3d": Case(DropBlock(0.3, 3, normalize="expected"), (4, 6, 5, 6, 7)),
    "DropPath of batches": Case(DropPath(0.3, "batch")),
    "Cutout": Case(Cutout(3)),
    "TokenDropout": Case(TokenDropout(0.3), (4, 6, 8)),
    "LockedDropout": Case(LockedDropout(0.3), (4, 6, 8)),
    "MixStyle": Case(MixStyle(0.9), derives=False),
    "ClipActivationGrad": Case(ClipActivationGrad(max_norm=0.1), derives=False),
    "ClipActivationGrad of samples": Case(ClipActivationGrad(max_norm=0.1, per_sample=True), derives=False),
    "ClipActivationGrad by value": Case(ClipActivationGrad(max_value=0.1), derives=False),
    "ClampActivationGrad": Case(ClampActivationGrad(max=0.1), derives=False),
    "ScaleActivationGrad": Case(ScaleActivationGrad(-0.5), derives=False),
    "NoiseActivationGrad": Case(NoiseActivationGrad(0.3), derives=False),
    "somebody else's": Case(nn.Dropout2d(0.3)),
}
_OTHERS = {name: cls for name, cls in REGULARIZERS.items() if name not in _CASES and cls is not DropBlock}
EVERY = {name: Case(cls(0.3)) for name, cls in _OTHERS.items()} | _CASES
FORWARD = {name: case for name, case in EVERY.items() if not case.in_backward}
"""Those that draw in a forward, so that their output is not their input."""

OF_ONE = {name: case for name, case in FORWARD.items() if not isinstance(case.regularizer, MixStyle)}
"""Those of them that can do something to a single sample."""

DERIVING = {name: case for name, case in EVERY.items() if case.derives}
"""Those whose gradient is the derivative of their output."""

WITH_A_RATE = {name: case for name, case in EVERY.items() if case.has_a_rate}


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    """Whether all are equal, bit for bit."""
    return len(a) == len(b) and all(torch.equal(s, t) for s, t in zip(a, b, strict=True))

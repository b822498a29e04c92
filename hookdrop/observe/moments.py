"""Mean and variance of numbers that come in parts, none of which is kept."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Moments:
    """Of all elements of all tensors that were added, in float64 (float32 where a device has no other).

    Reference: Chan, Golub, LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample variances".
    """

    def __init__(self) -> None:
        self.count = 0
        """Elements."""
        self.parts = 0
        """Tensors."""
        self._mean: Tensor | float = 0.0
        self._deviations: Tensor | float = 0.0
        """The sum of squared deviations from the mean. Both stay on the device: to read them would wait for it."""

    @torch.no_grad()
    def add(self, x: Tensor) -> None:
        """Add the elements of `x`; of a DTensor those of this rank."""
        x = x.detach()
        x = x.to_local() if hasattr(x, "to_local") else x
        if not x.numel():
            return
        x = x.to(torch.float32 if x.device.type == "mps" else torch.float64)
        var, mean = torch.var_mean(x, correction=0)
        new, total = x.numel(), self.count + x.numel()
        shift = mean - self._mean
        self._mean = self._mean + shift * (new / total)
        self._deviations = self._deviations + var * new + shift * shift * (self.count * new / total)
        self.count, self.parts = total, self.parts + 1

    @property
    def mean(self) -> float:
        """Nan of nothing."""
        return float(self._mean) if self.count else math.nan

    @property
    def variance(self) -> float:
        """Divided by the count, as `torch.var(correction=0)`; nan of nothing."""
        return float(self._deviations) / self.count if self.count else math.nan

    @property
    def rms(self) -> float:
        """The root of the mean square."""
        return math.sqrt(self.variance + self.mean**2)

    @property
    def norm(self) -> float:
        """The L2 norm of a tensor that was added, as the root of the mean of their squares."""
        return self.rms * math.sqrt(self.count / self.parts) if self.parts else math.nan

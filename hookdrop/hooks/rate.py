"""The rate that a hook passes to its regularizer."""

from __future__ import annotations

import torch

from hookdrop.utils.torch_internals import without_dispatch_modes


class CurrentRate:
    """An immutable rate of a call, as a float for eager code and as a tensor for compiled code."""

    def __init__(self, value: float | None, neutral: bool) -> None:
        self.value = value  # None if the regularizer has no rate
        self.neutral = neutral
        """Whether the regularizer is the identity at this rate. A bool, so that compiled code can branch on it."""
        # Compiled code takes the rate as a tensor, because floats become constants. Each rate is a new tensor, because
        # a graph whose backward is pending may hold the old one. It must be a real tensor even in fake-tensor mode.
        with torch.inference_mode(False), without_dispatch_modes():
            self.tensor = None if value is None else torch.tensor(value, dtype=torch.float64, device="cpu")


NO_RATE = CurrentRate(None, False)  # the regularizer is on, but takes no rate. (None means that it is off.)

"""The rate in force at a site."""

from __future__ import annotations

import torch

from hookdrop.utils.torch_internals import without_dispatch_modes


class Rate:
    """A rate for eager code (a float) and for compiled code (a tensor); it never changes, another one replaces it."""

    def __init__(self, value: float | None, neutral: bool) -> None:
        self.value = value
        """None for a regularizer without a rate."""
        self.neutral = neutral
        """Whether the regularizer does nothing at this rate: a bool, which compiled code can read."""
        # Compiled code takes the rate as a tensor: a float would be compiled in. Each rate is another tensor, since
        # a graph that waits for its backward pass may hold this one. It is real data, in whatever mode it is made.
        with torch.inference_mode(False), without_dispatch_modes():
            self.tensor = None if value is None else torch.tensor(value, dtype=torch.float64, device="cpu")

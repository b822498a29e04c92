"""Steps that other code may do faster than PyTorch operations, by type of device.

No code here has any. `hookdrop/__init__.py` names that of `hookdrop.accel`, which is imported when a mask is drawn.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from hookdrop.core.parts import Parts
from hookdrop.kernels.blocks import Blocks


class Accelerator:
    """The steps for one type of device. None means that PyTorch operations take the step."""

    def successes(self, logs: Tensor, divisor: float, trials: int, dtype: torch.dtype) -> Tensor | None:
        """Return the positions below `trials` at gaps of ceil(logs / divisor), or None if the gaps end before."""
        return None

    def scale_of_seeds(self, seeds: Tensor, blocks: Blocks, normalize: str) -> Tensor | None:
        """Return the scale that keeps the mean, given the seeds of the blocks."""
        return None

    def mask(self, x: Tensor, dropped: Tensor, scale: Tensor, blocks: Blocks | None = None) -> Tensor | None:
        """`masking.apply_mask_no_grad`, in one pass."""
        return None

    def can_draw(self, blocks: Blocks, device: torch.device) -> bool:
        """Whether `draw` draws such masks. It launches kernels, which a dispatch mode does not see."""
        return False

    def draw(self, blocks: Blocks, rate: float, normalize: str | None, device: torch.device) -> tuple[Tensor, Tensor]:
        """Draw `Blocks.packed`, and int64 counters of dropped elements, which `mask` takes instead of a scale."""
        raise NotImplementedError

    def counters_size(self, blocks: Blocks, normalize: str | None) -> int:
        """The length of these counters."""
        raise NotImplementedError

    def scale_of_counters(self, counters: Tensor, blocks: Blocks) -> Tensor:
        """Return the scale that keeps the mean, by PyTorch operations."""
        raise NotImplementedError


class _Accelerators(dict[torch.device, Accelerator]):
    def __missing__(self, device: torch.device) -> Accelerator:
        enabled = device.type in PLACES and os.environ.get("HOOKDROP_KERNEL") != "0"
        self[device] = found = PLACES[device.type] if enabled else Accelerator()
        return found


PLACES = Parts({})  # by type of device
ACCELERATORS = _Accelerators()  # by device

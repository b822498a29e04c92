"""Detached copies of activations, safe from in-place edits."""

from __future__ import annotations

import torch
from torch import Tensor

from hookdrop.errors import LayerError

CopyDevice = torch.device | str | None
"""The device of the copies; None is the device of the tensor."""


class NotRecordedError(LayerError, KeyError):
    """Nothing was recorded for the requested layer. A `KeyError`, as of a dict, but with a readable message."""

    __str__ = Exception.__str__


def valid_device(to: CopyDevice, owner: str) -> CopyDevice:
    """Return `to` if the device exists."""
    if to is not None:
        try:
            torch.empty(0, device=to)
        except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(
                f'{owner}: to must be a device such as "cpu" or "cuda:0", or None, got {to!r}.\n  PyTorch: {reason}'
            ) from None
    return to


def detached_copy(x: Tensor, to: CopyDevice = None) -> Tensor:
    """Return a detached copy of `x` that later in-place operations cannot change."""
    with torch.inference_mode(False), torch.no_grad():
        return x.detach().to(device=x.device if to is None else to, copy=True)

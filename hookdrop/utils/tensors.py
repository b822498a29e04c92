"""Tensor subclasses, and detached copies of activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from hookdrop.errors import LayerError

# --- subclasses with a `__torch_function__`, such as MONAI's MetaTensor

PLAIN_TYPES = (Tensor, nn.Parameter)
"""The types that are not such a subclass. Comparing with them is the fastest check."""


def wraps_results(x: Tensor) -> bool:
    """Whether the type of `x` wraps results in `__torch_function__` and stores its values in ordinary memory."""
    return has_torch_function((x,)) and type(x).__torch_dispatch__ is Tensor.__torch_dispatch__


def on_plain_tensor(function: Callable[..., Tensor], x: Tensor, *settings: Any) -> Tensor:
    """Call `function` on the plain tensor and let the subclass wrap the result, as for any PyTorch function.

    An autograd function must not receive the subclass: its `__torch_function__` would wrap the result in a view, and
    in-place operations on that view raise.
    """

    def unwrapped(x: Tensor, *settings: Any) -> Tensor:
        return function(x.as_subclass(Tensor), *settings)

    return handle_torch_function(unwrapped, (x,), x, *settings)


# --- copies

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

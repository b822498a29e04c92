"""Tensor subclasses with a `__torch_function__`, such as MONAI's MetaTensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

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

"""Tensor subclasses with a `__torch_function__`, such as MONAI's MetaTensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

PLAIN = (Tensor, nn.Parameter)
"""The types that are never a subclass of this kind; compared first, as it is fastest."""


def wraps_results(x: Tensor) -> bool:
    """Whether the type of `x` wraps results in `__torch_function__` and has its numbers in ordinary memory."""
    return has_torch_function((x,)) and type(x).__torch_dispatch__ is Tensor.__torch_dispatch__


def on_plain_tensor(function: Callable[..., Tensor], x: Tensor, *settings: Any) -> Tensor:
    """`function` of the plain tensor; the subclass wraps the result, as it does with any function of PyTorch.

    An autograd function must not see the subclass: what `__torch_function__` wraps in its forward is a view, and an
    in-place operation on that view raises.
    """

    def unwrapped(x: Tensor, *settings: Any) -> Tensor:
        return function(x.as_subclass(Tensor), *settings)

    return handle_torch_function(unwrapped, (x,), x, *settings)

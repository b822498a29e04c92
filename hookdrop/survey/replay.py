"""Repeat recorded operations on other values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from hookdrop.core.tensor_tree import map_leaves, tensors
from hookdrop.survey.trace import Node, Op

_RESHAPES: dict[str, Callable[..., Tensor]] = {"view": Tensor.reshape, "view_as": Tensor.reshape_as}
CPU = torch.device("cpu")


def replay(
    ops: Iterable[Op], values: Mapping[Node, Tensor], other: Callable[[Node], Tensor], device: torch.device = CPU
) -> dict[Node, Tensor]:
    """Compute operations again, in this order, and return the values of all their tensors, by node, on one device.

    It begins with `values`; `other` returns those of tensors that are neither given nor computed, such as weights. What
    an operation raises is raised.
    """
    known = dict(values)

    def value(leaf: Any) -> Any:
        if isinstance(leaf, Node):
            return known[leaf] if leaf in known else other(leaf)
        return device if isinstance(leaf, torch.device) else leaf

    for op in ops:
        if op.is_in_place:  # the values of the caller stay as they are
            known[op.inputs[0]] = value(op.inputs[0]).clone()
        # A view needs the strides of the recorded tensor, which the values need not have.
        is_view = op.name in _RESHAPES and op.outputs[0].dtype == op.inputs[0].dtype
        function = _RESHAPES[op.name] if is_view else op.function
        with device:  # not the default device of the user
            result = function(*map_leaves(op.args, value), **map_leaves(op.kwargs, value))
        made = [known[op.inputs[0]]] if op.is_in_place else tensors(result)
        known.update(zip(op.outputs, made, strict=True))
    return known

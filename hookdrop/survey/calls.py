"""The calls of a layer, as a hook with these settings would see them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hookdrop.survey.trace import Call, Node, Trace
from hookdrop.utils.errors import ShapeError
from hookdrop.utils.tensor_tree import TensorKey, fits, map_leaves, map_tensor, tensors


@dataclass
class LayerCalls:
    """The calls of a layer in one forward."""

    calls: int = 0
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    """The distinct shapes of the selected tensor, in the order of the calls."""
    mismatch: str = ""
    """Why no tensor could be selected; empty if one was."""
    tensor_count: int = 0
    """The number of tensors in the output that could be regularized; 0 if there is only one."""
    resembles_input: bool = False
    """Whether the output includes the input, as for a whole residual block."""
    feeds_norm: bool = False
    """Whether the output is the input of a batch norm."""

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The last shape, or None."""
        return self.shapes[-1] if self.shapes else None


def layer_calls(trace: Trace, calls: list[Call], at: str, tensor: TensorKey) -> LayerCalls:
    """Return what a hook at the input or output of a layer sees in these calls.

    Args:
        trace: the forward.
        calls: the calls of the layer.
        at: `"output"`; otherwise the input.
        tensor: selects the tensor, as in `inject`.
    """
    seen = LayerCalls(len(calls))

    def look(x: Tensor) -> Tensor:
        if tuple(x.shape) not in seen.shapes:
            seen.shapes.append(tuple(x.shape))
        return x

    for call in calls:
        value = map_leaves(call.output if at == "output" else call.arguments, _without_values)
        several = sum(map(fits, tensors(value)))
        seen.tensor_count = several if several > 1 and tensor is None and at == "output" else 0
        try:
            map_tensor(value, tensor, look)
        except ShapeError as error:
            seen.mismatch = str(error)
        if at == "output" and isinstance(call.output, Node):
            users = trace.users.get(call.output, [])
            seen.feeds_norm |= any(op.name == "batch_norm" and op.inputs[0] is call.output for op in users)
    return seen


def _without_values(leaf: Any) -> Any:
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if isinstance(leaf, Node) else leaf

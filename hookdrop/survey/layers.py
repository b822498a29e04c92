"""The calls of a layer as a hook would see them, and the layers that LayerDrop can skip.

A layer can be skipped if it returns its input, apart from residual branches and norms.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hookdrop.survey.branches import Branch, Residual, is_linear
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
    identities: list[str] = field(default_factory=list)
    """The layer itself and those that get its output, if they return their input in eval mode, as dropout does."""

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The last shape, or None."""
        return self.shapes[-1] if self.shapes else None


def layer_calls(trace: Trace, residuals: list[Residual], calls: list[Call], at: str, tensor: TensorKey) -> LayerCalls:
    """Return what a hook `at` the input or output of a layer sees in these calls; `tensor` is that of `inject`."""
    seen, sums = LayerCalls(len(calls)), {residual.output: residual for residual in residuals}

    def look(x: Tensor) -> Tensor:
        if tuple(x.shape) not in seen.shapes:
            seen.shapes.append(tuple(x.shape))
        return x

    for call in calls:
        value = call.output if at == "output" else call.arguments
        value = map_leaves(value, lambda leaf: _on_meta(leaf) if isinstance(leaf, Node) else leaf)
        several = sum(map(fits, tensors(value)))
        seen.tensor_count = several if several > 1 and tensor is None and at == "output" else 0
        try:
            map_tensor(value, tensor, look)
        except ShapeError as error:
            seen.mismatch = str(error)
        if at == "output":
            seen.resembles_input |= _includes_input(call, sums)
            users = trace.users.get(call.output, []) if isinstance(call.output, Node) else []
            seen.feeds_norm |= any(op.name == "batch_norm" and op.inputs[0] is call.output for op in users)
            readers = [call, *(one for one in trace.calls if any(_leads_to(call.output, x) for x in one.inputs[:1]))]
            seen.identities += [one.name for one in readers if _returns_input(one)]
    return seen


def _on_meta(node: Node) -> Tensor:
    return torch.empty(node.shape, dtype=node.dtype, device="meta")


def _leads_to(start: Any, node: Node) -> bool:
    """Whether only linear operations lead from a node to another, such as a gain per channel."""
    while node is not start and node.op is not None and is_linear(node.op):
        node = node.op.inputs[0]
    return node is start


def _returns_input(call: Call) -> bool:
    """Whether a call returns its input, apart from dropout, which does nothing in eval mode."""
    node = next(iter(call.outputs), None)
    while node is not None and node.op is not None and "dropout" in node.op.name:
        node = node.op.inputs[0]
    return node is not None and node in call.inputs[:1]


def find_skippable(trace: Trace, residuals: list[Residual], branches: Iterable[Branch]) -> dict[str, str]:
    """Return the layers around residual branches, each with the reason why it cannot be skipped; empty if it can."""
    sums = {residual.output: residual for residual in residuals}
    names = _around_parts(trace, dict.fromkeys(branch.layer for branch in branches))
    found = {}
    for name in names:
        reasons = [_reason(call, sums) for call in trace.calls_of[name]]
        found[name] = next(filter(None, reasons), "")
    return found


def _around_parts(trace: Trace, names: Iterable[str]) -> list[str]:
    """Replace blocks by the layer that different kinds of them form: T5's layers are lists of three blocks."""
    calls = {name: trace.calls_of[name][0] for name in names}
    parts: dict[Call, list[Call]] = {}
    for call in calls.values():
        if call.parent is not None and call.parent.name:
            parts.setdefault(call.parent, []).append(call)
    wholes = {
        part.name: whole.name
        for whole, inside in parts.items()
        if len(inside) > 1 and len({part.type for part in inside}) == len(inside)
        for part in inside
    }
    return list(dict.fromkeys(wholes.get(name, name) for name in calls))


def _reason(call: Call, sums: Mapping[Node, Residual]) -> str:
    inputs, outputs = ([node for node in nodes if node.fits] for nodes in (call.inputs, call.outputs))
    if not inputs or not outputs:
        return "it takes or returns no floating-point tensor"
    x, y = inputs[0], outputs[0]
    if x.shape != y.shape:
        return f"it changes the shape {x.shape} to {y.shape}"
    source, added = _source(y, sums, call.start)
    if source is not x or not added:
        return "its first output is not its first input plus residual branches"
    for other in outputs[1:]:
        if other is not y and _source(other, sums, call.start)[1]:
            return "it returns several tensors with residual branches"
    return ""


def _includes_input(call: Call, sums: Mapping[Node, Residual]) -> bool:
    """Whether the output of a call is its input plus residual branches, apart from norms and activations."""
    outputs = [node for node in call.outputs if node.fits][:1]
    found = [_source(node, sums, call.start, loosely=True) for node in outputs]
    return any(added and source in call.inputs for source, added in found)


def _source(node: Node, sums: Mapping[Node, Residual], since: int, loosely: bool = False) -> tuple[Node, bool]:
    """Return the tensor from which skips and norms lead to a node, and whether there is an addition on the way.

    `loosely` also follows activations.
    """
    added = False
    while (op := node.op) is not None and node.index > since:
        residual = sums.get(node)
        inputs = [one for one in op.inputs if one.fits and one.is_data == node.is_data and one.size == node.size]
        simple = is_linear(op) or "norm" in op.name or (loosely and len(op.inputs) == 1)
        if residual is not None and not residual.is_projection:
            node, added = residual.skip, True
        elif len(inputs) == 1 and simple:
            node = inputs[0]
        else:
            break
    return node, added

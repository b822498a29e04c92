"""The calls of a layer as a hook would see them, and the layers that LayerDrop can skip.

A layer can be skipped if it returns its input, apart from residual branches and norms of tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hookdrop.core.errors import ShapeError
from hookdrop.core.tensor_tree import TensorKey
from hookdrop.survey.branches import Branch
from hookdrop.survey.ops import CONVS, COPIES, CROPS, DROPOUTS, ENLARGING, SOFTMAX, VIEWS
from hookdrop.survey.replay import replay
from hookdrop.survey.residuals import Residual, added, has_weights, is_linear
from hookdrop.survey.trace import Call, Node, Op, Trace, nodes_in, select_nodes, upstream

Step = tuple[Op, Node]
"""An operation on a skip, and its input on the skip."""


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
    predicts: str = ""
    """The layer that computes a prediction, if the tensor is one that the model returns: see `find_predictions`."""
    identities: list[str] = field(default_factory=list)
    """The layer itself and those that get its output, if they return their input in eval mode, as dropout does."""

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The last shape, or None."""
        return self.shapes[-1] if self.shapes else None


def layer_calls(trace: Trace, residuals: list[Residual], calls: list[Call], at: str, tensor: TensorKey) -> LayerCalls:
    """Return what a hook `at` the input or output of a layer sees in these calls; `tensor` is that of `inject`."""
    seen, sums = LayerCalls(len(calls)), {residual.output: residual for residual in residuals}
    predictions = find_predictions(trace)
    for call in calls:
        value = call.output if at == "output" else call.arguments
        several = sum(node.fits for node in nodes_in(value))
        seen.tensor_count = several if several > 1 and tensor is None and at == "output" else 0
        try:
            for node in select_nodes(value, tensor):
                seen.predicts = predictions.get(node, seen.predicts)
                seen.shapes += [] if node.shape in seen.shapes else [node.shape]
        except ShapeError as error:
            seen.mismatch = str(error)
        if at == "output":
            seen.resembles_input |= _includes_input(call, sums)
            users = trace.users.get(call.output, []) if isinstance(call.output, Node) else []
            seen.feeds_norm |= any(op.name == "batch_norm" and op.inputs[0] is call.output for op in users)
            identities = filter(_returns_input, trace.calls)  # few, unlike the calls that a tensor may lead to
            seen.identities += [one.name for one in identities if _leads_to(call.output, one.inputs[0])]
    return seen


_FUNCTIONS = frozenset({"log_softmax", "sigmoid", "logsigmoid", "mul", "div", "neg"})  # of predictions
_AFTER_PREDICTIONS = _FUNCTIONS | VIEWS | CROPS | COPIES | DROPOUTS | SOFTMAX | (ENLARGING - CONVS)


def find_predictions(trace: Trace) -> dict[Node, str]:
    """Return the tensors from a layer that computes a prediction to an output of the model, each with the layer.

    The layer changes the number of features, as a classifier does, and only views, softmax, sigmoid and resizing
    follow. The features of a backbone come from a norm, an activation, pooling or a skip, and necks keep their number.
    """
    found: dict[Node, str] = {}
    for node in trace.outputs:
        path = [node]
        while (op := path[-1].op) and op.name in _AFTER_PREDICTIONS and sum(one.is_data for one in op.inputs) == 1:
            path.append(next(one for one in op.inputs if one.is_data))
        if op and op.call and (op.name == "linear" or op.name in CONVS) and op.inputs[0].is_data:
            axis = -1 if op.name == "linear" else 1
            if op.inputs[0].shape[axis] != op.outputs[-1].shape[axis]:
                found |= dict.fromkeys(path, op.call.name)
    return found


def _leads_to(start: Any, node: Node) -> bool:
    """Whether only linear operations lead from a node to another, such as a gain per channel."""
    while node is not start and node.op is not None and is_linear(node.op):
        node = node.op.inputs[0]
    return node is start


def _returns_input(call: Call) -> bool:
    """Whether a call returns its input itself, as dropout does in eval mode."""
    return bool(call.outputs) and call.outputs[:1] == call.inputs[:1]


def find_skippable(trace: Trace, residuals: list[Residual], branches: Collection[Branch]) -> dict[str, str]:
    """Return the layers around residual branches, each with the reason why it cannot be skipped; empty if it can."""
    sums = {residual.output: residual for residual in residuals}
    around = [branch.layer for branch in branches if branch.layer != branch.end]
    names = _around_parts(trace, dict.fromkeys(around or [branch.layer for branch in branches]))
    known = tuple(f"{name}." for name in names)
    alone = [branch.end for branch in branches if around and not f"{branch.end}.".startswith(known)]
    stacked = tuple(f"{name}." for name in trace.repeated(alone))  # not a single one, such as that of positions
    found = {name: next(filter(None, [_reason(call, sums) for call in trace.calls_of[name]]), "") for name in names}
    outer = [trace.calls_of[name][0].parent for name in alone if f"{name}.".startswith(stacked)]
    return found | {call.name: _LOOP for call in outer if call is not None}


_LOOP = "it adds the branches of several layers, which are no modules of their own"


def _around_parts(trace: Trace, names: Collection[str]) -> list[str]:
    """Replace blocks by the layer that different kinds of them form: T5's layers are lists of three blocks."""
    repeated = trace.repeated(names)
    calls = {name: trace.calls_of[name][0] for name in names}
    parts: dict[Call, list[Call]] = {}
    for call in calls.values():
        if call.parent is not None and call.parent.name:
            parts.setdefault(call.parent, []).append(call)
    wholes = {
        part.name: whole.name
        for whole, inside in parts.items()
        if len(inside) > 1 and len({_kind(trace, part, whole.name in repeated) for part in inside}) == len(inside)
        for part in inside
    }
    return list(dict.fromkeys(wholes.get(name, name) for name in calls))


def _kind(trace: Trace, part: Call, whole_is_repeated: bool) -> object:
    """Return the class of a part, and if it is of a layer with equal siblings, also the shapes of its parameters."""
    return trace.kinds[part.name] if whole_is_repeated else part.type


def _reason(call: Call, sums: Mapping[Node, Residual]) -> str:
    inputs, outputs = ([node for node in nodes if node.fits] for nodes in (call.inputs, call.outputs))
    if not inputs or not outputs:
        return "it takes or returns no floating-point tensor"
    x, y = inputs[0], outputs[0]
    if x.shape != y.shape:
        return f"it changes the shape {x.shape} to {y.shape}"
    steps = _steps(y, sums, call.start)
    if not steps or steps[-1][1] is not x or not _has_sum(steps, sums):
        return "its first output is not its first input plus residual branches"
    if not _keeps(x, steps):
        return "its skip does not keep its input: without the branches, the layer does not return it"
    for other in outputs[1:]:
        if other is not y and _has_sum(_steps(other, sums, call.start), sums):
            return "it returns several tensors with residual branches"
    return ""


def _includes_input(call: Call, sums: Mapping[Node, Residual]) -> bool:
    """Whether the output of a call is its input plus residual branches, apart from norms and activations."""
    outputs = [node for node in call.outputs if node.fits]
    steps = _steps(outputs[0], sums, call.start, loosely=True) if outputs else []
    return _has_sum(steps, sums) and steps[-1][1] in call.inputs


def _has_sum(steps: list[Step], sums: Mapping[Node, Residual]) -> bool:
    return any(op.outputs[-1] in sums for op, _ in steps)


def _steps(node: Node, sums: Mapping[Node, Residual], since: int, loosely: bool = False) -> list[Step]:
    """Return the additions, norms and linear operations that lead to a node along skips, the last first.

    `loosely` also follows activations, and takes a projection for a skip.
    """
    steps: list[Step] = []
    while (op := node.op) is not None and node.index > since:
        residual = sums.get(node)
        inputs = [one for one in op.inputs if one.fits and one.is_data == node.is_data and one.size == node.size]
        simple = is_linear(op) or "norm" in op.name or (loosely and len(op.inputs) == 1)
        if residual is not None and (loosely or not residual.is_projection):
            node = residual.root if residual.is_projection else residual.skip
        elif len(inputs) == 1 and simple:
            node = inputs[0]
        else:
            break
        steps.append((op, node))
    return steps


def _keeps(x: Node, steps: list[Step]) -> bool:
    """Whether these steps return `x` if the branches are 0: repeat them on numbers, without norms of tokens."""
    numbers = value = torch.arange(float(x.size), dtype=torch.float64, device="cpu").view(x.shape)

    def zeros(node: Node) -> Tensor:
        return torch.zeros(node.shape, dtype=value.dtype if node.fits else node.dtype, device="cpu")

    for op, before in reversed(steps):
        if op.name == "batch_norm":
            return False
        if op.name not in COPIES | {"alias"} and "norm" not in op.name:
            value = replay([op], {before: value}, zeros)[op.outputs[-1]]
    return torch.equal(value, numbers)


def find_streams(calls: Iterable[Call]) -> list[list[str]]:
    """Return the arguments that an output of a layer is the sum of, for each output to which branches are added."""
    found: dict[int, dict[str, None]] = {}
    for call in calls:
        for index, output in enumerate(dict.fromkeys(node for node in call.outputs if node.fits)):
            terms = _terms(output, call)
            given = [(node, name) for name, value in call.arguments.items() for node in nodes_in(value)]
            names = {node: name for node, name in reversed(given) if node in terms and node.size == output.size}
            if any(node.is_data and node.has_weights for node in terms.difference(call.inputs)):
                found.setdefault(index, {}).update(dict.fromkeys(reversed(names.values())))
    return [[*names] for names in found.values() if names]


def _terms(output: Node, call: Call) -> set[Node]:
    """Return the arguments and the tensors of a call that its output is a sum of, apart from norms and activations."""

    def before(op: Op) -> Sequence[Node]:
        node = op.outputs[-1]
        same = [one for one in op.inputs if one.fits and one.is_data == node.is_data and one.size == node.size]
        # Not what attention adds to its scores, such as a mask.
        is_function = len(op.inputs) == 1 and not has_weights(op) and op.name not in SOFTMAX
        is_simple = is_linear(op) or "norm" in op.name or is_function
        terms = added(op) or (same if is_simple and len(same) == 1 else ())
        return terms if op.index > call.start else ()

    return {node for node in upstream([output], before) if node.op is None or not before(node.op)}

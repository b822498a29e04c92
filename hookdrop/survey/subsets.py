"""Find what a residual branch needs in order to run on some of the samples, without running it once more.

A run without values, on another number of samples, shows which arguments have a row for each of them: with the others,
the shapes do not fit, whereas a table of positions may well have as many rows as the batch. Its operations are then
repeated with one sample replaced: no other sample in the result may change.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hookdrop.survey.experiment import changes
from hookdrop.survey.isolation import Arguments, forked_rng
from hookdrop.survey.ops import PARTS
from hookdrop.survey.replay import replay
from hookdrop.survey.trace import Node, Trace, record
from hookdrop.utils.errors import ShapeError
from hookdrop.utils.tensor_tree import TensorKey, describe, map_leaves, map_tensor, tensors, with_rows
from hookdrop.utils.torch_internals import HOOK_TABLES


class Subset(NamedTuple):
    """What a branch needs in order to run on some of the samples."""

    arguments: frozenset[int]  #: Which of the tensors in its arguments have a row for each sample, by their order.
    outputs: int  #: How many tensors it returns.
    obstacle: str  #: Why it must run on all samples nevertheless; empty if it need not.


def find_subset(branch: nn.Module, value: tuple[Any, Any], x: Tensor, tensor: TensorKey) -> Subset:
    """Return what a branch needs in calls such as the one with the arguments `value`, without calling it.

    `tensor` is that of `inject`: which tensor in the output is the result.

    Raises:
        ShapeError: the samples in the result may depend on others, whichever arguments are selected.
    """
    given, twin = tensors(value), _without_hooks(branch)
    groups: dict[Any, list[int]] = {}
    for index, leaf in enumerate(given):
        if leaf.dim() > 0 and len(leaf) == len(x):
            groups.setdefault("x" if leaf is x else (leaf.shape, leaf.dtype), []).append(index)
    mine = groups.pop("x")
    # A number that is no size of anything else, so that no wrong shape fits.
    sizes = {size for leaf in (*given, *branch.parameters(), *branch.buffers()) for size in leaf.shape}
    count = next(number for number in itertools.count(3) if number not in sizes)
    rows = torch.arange(count, device=x.device) % len(x)
    value = map_leaves(value, lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf)
    reason: Exception | None = None
    for chosen in itertools.product((False, True), repeat=len(groups)):
        arguments = frozenset(mine).union(*itertools.compress(groups.values(), chosen))
        try:
            return _run(twin, with_rows(value, arguments, rows)[0], arguments, count, tensor)
        except Exception as error:  # a shape that does not fit, or any other
            reason = error
    why = str(reason.__cause__ or reason).strip().partition("\n")[0].rstrip(".")
    raise ShapeError(
        f"got {describe(value)}: the branch cannot run on some of the samples: {why}.\n"
        '  use mode="row", which runs the branch on all samples'
    ) from reason


def _without_hooks(branch: nn.Module) -> nn.Module:
    """Return a module that shares everything with the branch, except its own hooks, which are running."""
    twin: nn.Module = object.__new__(type(branch))
    vars(twin).update(vars(branch))
    vars(twin).update({name: OrderedDict() for first, more in HOOK_TABLES for name in (first, *more)})
    return twin


def _run(branch: nn.Module, value: Any, arguments: frozenset[int], count: int, tensor: TensorKey) -> Subset:
    cache = torch.is_autocast_cache_enabled()
    try:
        # A cast of a weight without gradients must not serve a later forward.
        torch.set_autocast_cache_enabled(False)
        trace = record(branch, Arguments(*value))
        weights = [*branch.parameters(), *branch.buffers()]
        leaves = [*weights, *tensors(value)]  # the indices of nodes begin with these
        inputs = [node for node in trace.calls[0].inputs if node.leaf == "input"]
        selected = [node for node in inputs if node.index - len(weights) in arguments]
        results = _results(trace.calls[0].output, tensor)
        with forked_rng(branch), torch.no_grad():
            _check_rows(trace, results, selected, leaves, count)
    finally:
        torch.set_autocast_cache_enabled(cache)
    depends, outputs = trace.reached(selected), trace.calls[0].outputs
    others = [node for node in outputs if node not in (*results, *inputs)]
    further = [_on_meta(node) for node in others if node in depends or count in node.shape]
    obstacle = f"also returns {', '.join(map(describe, further))}, which depends on the samples" if further else ""
    if any(op.is_in_place and _is_part_of(op.inputs[0], selected) for op in trace.ops):
        obstacle = "changes its input in place"
    return Subset(arguments, len(outputs), obstacle)


def _results(output: Any, tensor: TensorKey) -> list[Node]:
    """Return the nodes that `tensor` selects."""
    known: list[tuple[Tensor, Node]] = []
    found: list[Node] = []

    def stand_in(leaf: Any) -> Any:
        if isinstance(leaf, Node):
            known.append((_on_meta(leaf), leaf))
        return known[-1][0] if isinstance(leaf, Node) else leaf

    def note(x: Tensor) -> Tensor:
        found.extend(node for y, node in known if y is x)
        return x

    map_tensor(map_leaves(output, stand_in), tensor, note)
    return found


def _on_meta(node: Node) -> Tensor:
    return torch.empty(node.shape, dtype=node.dtype, device="meta")


def _check_rows(trace: Trace, results: list[Node], selected: list[Node], leaves: list[Tensor], count: int) -> None:
    """Raise unless each of `count` rows of the results depends on the same row of the selected arguments only."""
    ops = [op for op in trace.ops if any(trace.leads(node, y) or node is y for node in op.outputs for y in results)]

    def other(node: Node) -> Tensor:
        return (
            leaves[node.index] if node.leaf != "constant" else torch.zeros(node.shape, dtype=node.dtype, device=device)
        )

    given = {node: leaves[node.index] for node in selected}
    device = leaves[selected[0].index].device
    rows = [0, 0, *range(2, count)]
    whole = replay(ops, given, other, device)
    replaced = replay(ops, {node: x[rows] for node, x in given.items()}, other, device)
    for node in results:
        if node.shape[0] != count:
            raise ShapeError(f"for {count} samples, it returns {node.shape[0]} rows")
        before, after = (values[node].float().flatten(1)[[0, *rows[2:]]] for values in (whole, replaced))
        if changes(before, after, 1e-3).any():
            raise ShapeError("one of them changes the result of others")


def _is_part_of(node: Node, tensors: list[Node]) -> bool:
    while node.op is not None and node.op.name in PARTS:
        node = node.op.inputs[0]
    return node in tensors

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
from hookdrop.utils.tensor_tree import TensorKey, describe, leaves_of, map_leaves, map_tensor, tensors, with_rows
from hookdrop.utils.torch_internals import HOOK_TABLES


class Subset(NamedTuple):
    """What a branch needs in order to run on some of the samples."""

    arguments: frozenset[int] = frozenset()  #: Which of its tensors have a row for each sample, by their order.
    outputs: int = 0  #: How many tensors it returns.
    obstacle: str = ""  #: Why it must run on all samples nevertheless.


def find_subset(branch: nn.Module, value: tuple[Any, Any], x: Tensor, tensor: TensorKey) -> Subset:
    """Return what a branch needs in calls such as the one with the arguments `value`, without calling it.

    `tensor` is that of `inject`: which tensor in the output is the result.
    """
    given = tensors(value)
    if unknown := {type(leaf).__name__ for leaf in leaves_of(value) if not isinstance(leaf, _WITHOUT_SAMPLES)}:
        return Subset(obstacle=f"also receives a {min(unknown)}, whose samples cannot be selected")
    groups: dict[Any, list[int]] = {}
    for index, leaf in enumerate(given):
        if leaf.dim() > 0 and len(leaf) == len(x):
            groups.setdefault("x" if leaf is x else (leaf.shape, leaf.dtype), []).append(index)
    mine, twin = groups.pop("x"), _without_hooks(branch)
    # A number that is no size of anything else, so that no wrong shape fits.
    sizes = {size for leaf in (*given, *branch.parameters(), *branch.buffers()) for size in leaf.shape}
    rows = torch.arange(next(n for n in itertools.count(3) if n not in sizes), device=x.device) % len(x)
    value = map_leaves(value, lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf)
    cache, reason = torch.is_autocast_cache_enabled(), ""
    for chosen in itertools.product((False, True), repeat=len(groups)):
        arguments = frozenset(mine).union(*itertools.compress(groups.values(), chosen))
        try:
            # A cast of a weight without gradients must not serve a later forward.
            torch.set_autocast_cache_enabled(False)
            with forked_rng(branch), torch.no_grad():
                return _run(twin, with_rows(value, arguments, rows)[0], arguments, len(rows), tensor)
        except Exception as error:  # a shape that does not fit, or any other
            reason = str(error.__cause__ or error).strip().partition("\n")[0].rstrip(".")
        finally:
            torch.set_autocast_cache_enabled(cache)
    return Subset(obstacle=f"cannot run on some of the samples ({reason})")


_WITHOUT_SAMPLES = (Tensor, bool, int, float, str, torch.dtype, torch.device, type(None))


def _without_hooks(branch: nn.Module) -> nn.Module:
    """Return a module that shares everything with the branch, except its own hooks, which are running."""
    twin: nn.Module = object.__new__(type(branch))
    vars(twin).update(vars(branch), **{name: OrderedDict() for one, more in HOOK_TABLES for name in (one, *more)})
    return twin


def _run(branch: nn.Module, value: Any, arguments: frozenset[int], count: int, tensor: TensorKey) -> Subset:
    trace = record(branch, Arguments(*value))
    weights = [*branch.parameters(), *branch.buffers()]
    leaves = [*weights, *tensors(value)]  # the indices of nodes begin with these
    inputs = [node for node in trace.calls[0].inputs if node.leaf == "input"]
    selected = [node for node in inputs if node.index - len(weights) in arguments]
    # In place of nodes, tensors without values, from which `tensor` selects.
    meta = {node: node.without_values() for node in trace.calls[0].outputs}
    results: list[Tensor] = []

    def note(y: Tensor) -> Tensor:
        results.append(y)
        return y

    output = map_leaves(trace.calls[0].output, lambda leaf: meta[leaf] if isinstance(leaf, Node) else leaf)
    map_tensor(output, tensor, note)
    chosen = [node for node, y in meta.items() if any(y is one for one in results)]
    _check_rows(trace, chosen, selected, leaves, count)
    depends = trace.reached(selected)
    others = [node for node in meta if node not in (*chosen, *inputs) and (node in depends or count in node.shape)]
    obstacle = f"also returns {', '.join(describe(meta[node]) for node in others)}, which depends on the samples"
    if any(op.is_in_place and _is_part_of(op.inputs[0], selected) for op in trace.ops):
        return Subset(obstacle="changes its input in place")
    return Subset(arguments, len(tensors(output)), obstacle if others else "")


def _check_rows(trace: Trace, results: list[Node], selected: list[Node], leaves: list[Tensor], count: int) -> None:
    """Raise unless each of `count` rows of the results depends on the same row of the selected arguments only."""
    ops = [op for op in trace.ops if any(trace.leads(node, y) or node is y for node in op.outputs for y in results)]
    given, device = {node: leaves[node.index] for node in selected}, leaves[selected[0].index].device

    def other(node: Node) -> Tensor:
        constant = node.leaf == "constant"
        return torch.zeros(node.shape, dtype=node.dtype, device=device) if constant else leaves[node.index]

    rows = [0, 0, *range(2, count)]
    runs = [replay(ops, values, other, device) for values in (given, {node: x[rows] for node, x in given.items()})]
    for node in results:
        if node.shape[0] != count:
            raise ShapeError(f"for {count} samples, it returns {node.shape[0]} rows")
        before, after = (values[node].float().flatten(1)[[0, *rows[2:]]] for values in runs)
        if changes(before, after, 1e-3).any():
            raise ShapeError("one of them changes the result of others")


def _is_part_of(node: Node, wholes: list[Node]) -> bool:
    while node.op is not None and node.op.name in PARTS:
        node = node.op.inputs[0]
    return node in wholes

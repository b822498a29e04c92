"""Find what a residual branch needs in order to run on some of the samples, without running it once more.

A run without values, on another number of samples, shows which arguments have a row for each of them: with the others,
the shapes do not fit, whereas a table of positions may well have as many rows as the batch. Its operations are then
repeated with one sample replaced: no other sample in the result may change.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hookdrop.core.errors import ShapeError
from hookdrop.core.tensor_tree import TensorKey, describe, first_tensor, leaves_of, map_leaves, tensors
from hookdrop.core.torch_internals import HOOK_TABLES, BatchNorm
from hookdrop.regularizers.samples import with_rows
from hookdrop.survey.experiment import changes
from hookdrop.survey.isolation import Arguments, forked_rng, other_hooks
from hookdrop.survey.ops import PARTS
from hookdrop.survey.record import record
from hookdrop.survey.replay import replay
from hookdrop.survey.trace import Call, Node, Trace, select_nodes


class Subset(NamedTuple):
    """What a branch needs in order to run on some of the samples."""

    arguments: frozenset[int] = frozenset()  #: Which of its tensors have a row for each sample, by their order.
    outputs: int = 0  #: How many tensors it returns.
    obstacle: str = ""  #: Why it must run on all samples nevertheless.
    mixes: str = ""  #: Why it must run on all samples, unless nothing uses what it returns.

    def why_all(self, discards: bool) -> str:
        """Return why it must run on all samples; empty if a part suffices. `discards`: none is kept."""
        return self.obstacle or self.mixes * (not discards)


HOOKED = Subset(obstacle="has a hook of other code inside, which may need all samples")


def find_subset(
    branch: nn.Module, value: tuple[Any, Any], x: Tensor, tensor: TensorKey, *, writes: bool = False
) -> Subset:
    """Return what a branch needs in calls such as the one with the arguments `value`, without calling it.

    `tensor` is that of `inject`: which tensor in the output is the result. `writes` is whether the branch may write to
    `x`, because nothing else reads it.
    """
    if norms := [name for name, module in branch.named_modules() if isinstance(module, BatchNorm)]:
        return Subset(obstacle=f"has a batch norm ({norms[0]})" if norms[0] else "is a batch norm")
    twin = _without_hooks(branch)
    if other_hooks(twin):
        return HOOKED
    given = tensors(value)
    if unknown := {type(leaf).__name__ for leaf in leaves_of(value) if not isinstance(leaf, _WITHOUT_SAMPLES)}:
        return Subset(obstacle=f"also receives a {min(unknown)}, whose samples cannot be selected")
    groups: dict[Any, list[int]] = {}
    for index, leaf in enumerate(given):
        if leaf.dim() > 0 and len(leaf) == len(x):
            groups.setdefault("x" if leaf is x else (leaf.shape, leaf.dtype), []).append(index)
    mine = groups.pop("x")
    # A number that divides no size of anything else: no wrong shape fits, and its multiples are rows of samples.
    sizes = {size for leaf in (*given, *branch.parameters(), *branch.buffers()) for size in leaf.shape if size}
    rows = torch.arange(next(n for n in itertools.count(3) if all(s % n for s in sizes)), device=x.device) % len(x)
    value = map_leaves(value, lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf)
    reason, mixed = "", None
    for chosen in itertools.product((False, True), repeat=len(groups)):
        arguments = frozenset(mine).union(*itertools.compress(groups.values(), chosen))
        try:
            with forked_rng(branch), torch.no_grad():
                some = with_rows(value, arguments, rows)[0]
                own = frozenset(mine) if writes else frozenset[int]()
                found = _run(twin, some, arguments, len(rows), tensor, own)
                if not found.mixes and not found.obstacle:
                    # What mixes samples in training mode only, such as statistics of a batch.
                    with suppress(Exception):  # it does not run without values there
                        found = _run(twin, some, arguments, len(rows), tensor, own, training=True)
            if not found.mixes:
                return found
            mixed = mixed or found
        except Exception as error:  # a shape that does not fit, or any other
            reason = str(error.__cause__ or error).strip().partition("\n")[0].rstrip(".")
        finally:  # a cast of a weight without gradients must not serve a later forward
            torch.clear_autocast_cache()
    return mixed or Subset(obstacle=f"cannot run on some of the samples ({reason})")


def subset_of_call(branch: nn.Module, call: Call, argument: str | None, tensor: TensorKey, *, writes: bool) -> Subset:
    """Return the same for a call of a survey, whose tensors have no values; `argument` is the one with the samples."""
    device = next((x.device for x in branch.parameters()), None)

    def random(leaf: Any) -> Any:
        if not isinstance(leaf, Node):
            return leaf
        kind = torch.rand if leaf.dtype.is_floating_point else torch.ones
        return kind(leaf.shape, device=device).to(leaf.dtype)

    given = {name: map_leaves(value, random) for name, value in call.arguments.items()}
    several = any(name.startswith("*") for name in given)
    value = ((*given.values(),), {}) if several else ((), given)
    x = first_tensor(given if argument is None else given[argument])
    return find_subset(branch, value, x, tensor, writes=writes)


_WITHOUT_SAMPLES = (Tensor, bool, int, float, str, torch.dtype, torch.device, type(None))


def _without_hooks(branch: nn.Module) -> nn.Module:
    """Return a module that shares everything with the branch, except its own hooks, which are running."""
    twin: nn.Module = object.__new__(type(branch))
    vars(twin).update(vars(branch), **{name: OrderedDict() for one, more in HOOK_TABLES for name in (one, *more)})
    twin._compiled_call_impl = None  # of `branch.compile()`, which calls the branch itself
    return twin


def _run(
    branch: nn.Module,
    value: Any,
    arguments: frozenset[int],
    count: int,
    tensor: TensorKey,
    written: frozenset[int],
    training: bool = False,
) -> Subset:
    trace = record(branch, Arguments(*value), training=training)
    weights = [*branch.parameters(), *branch.buffers()]
    leaves = [*weights, *tensors(value)]  # the indices of nodes begin with these
    inputs = [node for node in trace.calls[0].inputs if node.leaf == "input"]
    selected = [node for node in inputs if node.index - len(weights) in arguments]
    outputs, chosen = trace.calls[0].outputs, select_nodes(trace.calls[0].output, tensor)
    mixes = _mix(trace, chosen, selected, leaves, count)
    depends = trace.reached(selected)
    rest = [node for node in dict.fromkeys(outputs) if node not in (*chosen, *inputs)]

    def named(nodes: list[Node]) -> str:
        # A table of positions that is repeated for each sample and head: its size depends on the samples.
        more = [one for one in nodes if one in depends or any(size and size % count == 0 for size in one.shape)]
        return ", ".join(describe(node.without_values()) for node in more)

    changed = [_whole(op.inputs[0]) for op in trace.ops if op.is_in_place]
    if trace.changes_arguments or any(x in selected and x.index - len(weights) not in written for x in changed):
        return Subset(obstacle="changes an argument in place")
    if any(node.leaf == "weight" for node in changed):
        return Subset(obstacle="changes a parameter or a buffer, such as statistics of a batch")
    kept = [node for node in trace.stored if node not in inputs]
    obstacle = f"keeps {stored} elsewhere, with skipped samples too" if (stored := named(kept)) else ""
    obstacle = f"also returns {others}, which depends on the samples" if (others := named(rest)) else obstacle
    why = "cannot run on some of the samples (one of them changes the result of others)" if mixes else ""
    return Subset(arguments, len(outputs), obstacle, why)


def _mix(trace: Trace, results: list[Node], selected: list[Node], leaves: list[Tensor], count: int) -> bool:
    """Whether one of `count` rows of the selected arguments changes another row of the results."""
    ops = [op for op in trace.ops if any(trace.leads(node, y) or node is y for node in op.outputs for y in results)]
    given, device = {node: leaves[node.index] for node in selected}, leaves[selected[0].index].device
    others, generator = dict[Node, Tensor](), torch.Generator().manual_seed(0)

    def other(node: Node) -> Tensor:
        if node not in others:
            constant = node.leaf == "constant"
            x = torch.zeros(node.shape, dtype=node.dtype, device=device) if constant else leaves[node.index]
            # A factor of 0, such as a gate before its first update, would hide what it lets pass later.
            plain = type(x) in (Tensor, nn.Parameter) and x.is_floating_point() and x.numel()
            hides = plain and node.leaf != "input" and not bool(x.detach().abs().amax() > 1e-3)
            random = (torch.rand(x.shape, generator=generator, device="cpu") + 0.5) * max(x.numel(), 1) ** -0.25
            others[node] = random.to(x) if hides else x
        return others[node]

    def run(values: dict[Node, Tensor]) -> dict[Node, Tensor]:
        torch.manual_seed(0)  # dropout of the branch draws the same for both
        return replay(ops, values, other, device)

    rows = [0, 0, *range(2, count)]
    runs = [run(values) for values in (given, {node: x[rows] for node, x in given.items()})]
    for node in results:
        if node.shape[0] != count:
            raise ShapeError(f"for {count} samples, it returns {node.shape[0]} rows")
    pairs = [[values[node].float().flatten(1)[[0, *rows[2:]]] for values in runs] for node in results]
    return any(bool(changes(before, after, 1e-3).any()) for before, after in pairs)


def _whole(node: Node) -> Node:
    """Return the tensor that this one is a part of."""
    while node.op is not None and node.op.name in PARTS:
        node = node.op.inputs[0]
    return node

"""Find the image patches of a vision transformer, and check that the layers after them do not need all of them.

The patches are the last tensor (N, L, C) before the first attention through which all of the image passes. Tokens that
are equal for two different images are class tokens or registers. Two passes then show whether patches may be removed:
with the patches in another order, later layers must compute the same in that order, and with fewer patches they must
run. Windows, grids, relative positions and rotary embeddings fail one of both.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, combinations
from typing import Any

import torch
from torch import Tensor, nn

from hookdrop.core.tensor_tree import map_tensor, tensors
from hookdrop.survey.experiment import changes, experiment
from hookdrop.survey.heads import attention_cores
from hookdrop.survey.ops import HIDDEN_ATTENTION
from hookdrop.survey.trace import Node, Trace


@dataclass(frozen=True)
class Patches:
    """The tokens of image patches, which may be removed."""

    layer: str
    """The layer that returns them, as (N, L, C)."""
    prefix: int
    """The number of class and register tokens before them."""


def find_patches(trace: Trace) -> str | None:
    """Return the layer whose output is the patches with their positions; None if there is none."""
    cores = {*attention_cores(trace)}
    inputs = dict.fromkeys(node for op in trace.ops for node in op.inputs if node.leaf == "input")
    images = [node for node in inputs if node.fits and len(node.shape) >= 4]
    core = next((op for op in trace.ops if op.name in HIDDEN_ATTENTION or op in cores), None)
    if len(images) != 1 or core is None:
        return None
    depends = trace.reached(images) - trace.reached(inputs.keys() - {*images})
    returned = [(call, call.outputs[0]) for call in trace.calls if call.end < core.index and call.outputs]
    tokens = {node for _, node in returned if len(node.shape) == 3 and node.fits and node in depends}
    for last in sorted(tokens, key=lambda node: -node.index):
        if trace.reached(images, gate=last).isdisjoint(trace.outputs):  # all of the image passes through it
            call = next(call for call, node in returned if node is last)
            while call.parent is not None and call.parent.outputs[:1] == [last]:
                call = call.parent
            return call.name
    return None


def find_embedding(trace: Trace) -> str | None:
    """Return the layer that looks up the integers that the model is called with; None if there is none."""
    for op in trace.ops:
        if op.name == "embedding" and op.call is not None:
            indices = [node.shape for node in op.inputs if _given(node).leaf == "input"]
            if any(len(node.shape) == 3 and node.shape[:-1] in indices[:1] for node in op.call.outputs):
                return op.call.name or None
    return None


def _given(node: Node) -> Node:
    """Return the integers that a tensor of integers is computed from, such as tokens of which some were replaced."""
    while node.op is not None:
        integers = {one for one in node.op.inputs if one.is_data and one.dtype in (torch.int32, torch.int64)}
        if len(integers) != 1:
            break
        node = integers.pop()
    return node


def removable_patches(model: nn.Module, example: Any, layer: str) -> Patches | str:
    """Return the patches among the tokens (N, L, C) that a layer returns, or why later layers need all of them.

    `model` is without wrappers, and `example` has two different samples.
    """
    returned, outputs = _run(model, example, layer, None)
    tokens = returned[0] if len(returned) == 1 else None
    if tokens is None or tokens.dim() != 3 or len(tokens) != 2:
        return f"{layer!r} does not return one tensor (N, L, C) in each forward"
    equal = (tokens[0] == tokens[1]).all(-1)
    length, prefix = tokens.shape[1], int(equal.sum())
    if not equal[:prefix].all() or length - prefix < 2:
        return f"the tokens of {layer!r} that do not depend on the image are not the first ones"
    patches = torch.arange(prefix, length, device="cpu")
    order = torch.cat([torch.arange(prefix, device="cpu"), patches.roll(1 + len(patches) // 3)])
    for how, chosen in (("in another order", order), ("with fewer tokens", order[: prefix + len(patches) // 2])):
        try:
            changed = _run(model, example, layer, chosen)[1]
        except Exception as error:  # models fail in any way
            reason = "".join(str(error.__cause__ or error).strip().splitlines()[:1])
            return f"the layers after {layer!r} do not run {how}: {reason}"
        for (name, before), (_, after) in zip(outputs, changed if chosen is order else (), strict=False):
            if before.shape != after.shape or not _same_in_another_order(before, after, order):
                return f"{name!r} depends on the position of the tokens that it gets"
    return Patches(layer, prefix)


def _run(
    model: nn.Module, example: Any, layer: str, chosen: Tensor | None
) -> tuple[list[Tensor], list[tuple[str, Tensor]]]:
    """Run the model with the chosen tokens of a layer, or with all.

    Returns:
        What the layer returned in each call, and each output after it, by layer, projected to the axes that may be
        those of the tokens.
    """
    returned, outputs = list[Tensor](), list[tuple[str, Tensor]]()

    def watch(name: str, at: str, value: Any) -> None:
        if at == "output" and name == layer:
            returned.extend(tensors(value)[:1])
        elif at == "output" and not name.startswith(f"{layer}.") and returned and returned[0].dim() > 1:
            length = returned[0].shape[1]
            outputs.extend((name, _projected(x, length)) for x in tensors(value) if x.is_floating_point())

    def edit(output: Any) -> Any:
        return output if chosen is None else map_tensor(output, None, lambda x: x[:, chosen.to(x.device)])

    experiment(model, example, watch, {layer: edit})
    return returned, outputs


def _projected(x: Tensor, length: int) -> Tensor:
    """Project a tensor to its axes of this length; without any, to one number."""
    axes = [axis for axis, size in enumerate(x.shape) if size == length]
    rows = x.movedim(axes, [*range(len(axes))]).reshape(*[length] * len(axes), -1)
    weights = torch.randn(rows.shape[-1], generator=torch.Generator().manual_seed(0), device="cpu").to(rows)
    return (rows * weights).float().sum(-1)


def _same_in_another_order(before: Tensor, after: Tensor, order: Tensor) -> bool:
    """Whether what was computed from tokens in another order is the same in that order.

    An axis of the same length as the tokens may be another one, of channels or classes, and attention maps have two of
    tokens. So it has to be the same for one choice of axes.
    """
    axes = range(before.dim())
    for chosen in chain.from_iterable(combinations(axes, count) for count in reversed(range(len(axes) + 1))):
        ordered = before
        for axis in chosen:
            ordered = ordered.index_select(axis, order.to(before.device))
        if not changes(ordered, after, 1e-3).any():
            return True
    return False

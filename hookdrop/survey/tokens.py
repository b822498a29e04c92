"""Find the image patches of a vision transformer, and check that the layers after them do not need all of them.

The patches are the last tensor (N, L, C) before the first attention through which all of the image passes. Tokens that
are equal for two different images are class tokens or registers. Three passes then show whether patches may be removed:
with the patches in another order, later layers must compute the same in that order; with fewer patches they must run,
and return the same as with all if these are equal. Windows, grids, relative positions and rotary embeddings fail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain, combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hookdrop.core.errors import InjectionError
from hookdrop.core.tensor_tree import map_tensor, tensors
from hookdrop.core.torch_internals import is_fake
from hookdrop.survey.experiment import changes, experiment, random_weights
from hookdrop.survey.heads import attention_cores
from hookdrop.survey.isolation import rng_states
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


def find_embeddings(trace: Trace, given: list[Tensor]) -> list[str]:
    """Return the layers that look up the first tokens that the model is called with, in the order of execution.

    `given` are the tensors of the example. Tokens differ between samples, unlike positions, and between places, and are
    not all 0 or 1, as in masks and segments. If none do, as in a batch of 1, all that may be tokens count. The name is
    empty where the model itself looks them up.
    """
    found: list[tuple[str, int]] = []
    for op in trace.ops:
        if op.name == "embedding" and op.call is not None:
            indices = [(node.shape, _given(node)) for node in op.inputs if _given(node).leaf == "input"]
            if indices and any(len(x.shape) == 3 and x.shape[:-1] == indices[0][0] for x in op.call.outputs):
                found.append((op.call.name, trace.inputs.index(indices[0][1])))
    tokens = [index for _, index in found if _varies(given[index], (0, 1))]
    chosen = tokens[:1] or [index for _, index in found if _varies(given[index], (1,))] or [*range(len(given))]
    return [*dict.fromkeys(name for name, index in found if index in chosen)]


def _varies(x: Tensor, axes: tuple[int, ...]) -> bool:
    if is_fake(x) or x.is_meta or x.dim() < 2 or bool(((x == 0) | (x == 1)).all()):
        return False
    return all(bool((x != x.narrow(axis, 0, 1)).any()) for axis in axes)


def _given(node: Node) -> Node:
    """Return the integers that a tensor of integers is computed from, such as tokens of which some were replaced."""
    while node.op is not None:
        integers = {one for one in node.op.inputs if one.is_data and one.dtype in (torch.int32, torch.int64)}
        if len(integers) != 1:
            break
        node = integers.pop()
    return node


class _Run(NamedTuple):
    tokens: list[Tensor]  #: What the layer returned in each call, before it was changed.
    outputs: list[tuple[str, Tensor]]  #: Each output after it, projected to the axes that may be those of the tokens.
    results: list[Tensor]  #: What the model returned.
    states: list[list[Tensor]]  #: The states of the random numbers before and after.


Edit = Callable[[Tensor], Tensor]


def removable_patches(model: nn.Module, example: Any, layer: str) -> Patches | str:
    """Return the patches among the tokens (N, L, C) that a layer returns, or why later layers need all of them.

    `model` is without wrappers and at dropout rates of 0, and `example` has two different samples. The model runs in
    training mode, in which patches are removed, unless it cannot or draws random numbers there. All its weights are
    random: at first, many hide what later depends on the position.
    """
    weights = random_weights(model, everywhere=True)
    for training in (True, False):
        run = partial(_run, model, example, layer, weights, training)
        try:
            before = run(None)
        except InjectionError:  # it may need labels there
            if not training:
                raise
            continue
        if all(map(torch.equal, *before.states)):
            break
    if not before.results:
        return "it returns no tensor, or hides it in an object, so it is unknown what it needs"
    tokens = before.tokens[0] if len(before.tokens) == 1 else None
    if tokens is None or tokens.dim() != 3 or len(tokens) != 2:
        return f"{layer!r} does not return one tensor (N, L, C) in each forward"
    equal = (tokens[0] == tokens[1]).all(-1)
    length, prefix = tokens.shape[1], int(equal.sum())
    if not equal[:prefix].all() or length - prefix < 2:
        return f"the tokens of {layer!r} that do not depend on the image are not the first ones"
    return _why_all(run, before, layer, prefix, length) or Patches(layer, prefix)


def _why_all(run: Callable[[Edit], _Run], before: _Run, layer: str, prefix: int, length: int) -> str:
    """Return why the layers after one need all of its tokens; empty if they do not."""
    patches = torch.arange(prefix, length, device="cpu")
    order = torch.cat([torch.arange(prefix, device="cpu"), patches.roll(1 + len(patches) // 3)])

    def equal_ones(count: int) -> Edit:
        return lambda x: x.mean(1, keepdim=True).expand(-1, count, -1)

    edits = {
        "in another order": lambda x: x[:, order.to(x.device)],
        "with fewer tokens": equal_ones(prefix + len(patches) // 2),
        "with equal tokens": equal_ones(length),
    }
    results = list[list[Tensor]]()
    for how, edit in edits.items():
        try:
            changed = run(edit)
        except Exception as error:  # models fail in any way
            reason = "".join(str(error.__cause__ or error).strip().splitlines()[:1])
            return f"the layers after {layer!r} do not run {how}: {reason}"
        for (name, x), (_, y) in zip(before.outputs, () if results else changed.outputs, strict=False):
            if x.shape != y.shape or not _same_in_another_order(x, y, order):
                return f"{repr(name) if name else 'the model'} depends on the position of the tokens that it gets"
        results.append(changed.results)
    # The mean, the maximum and attention of equal tokens are the same for any number of them, unlike the sum.
    for x, y in zip(*results[1:], strict=False):
        sizes = [slice(min(pair)) for pair in zip(x.shape, y.shape, strict=False)]
        is_map = sum(a != b for a, b in zip(x.shape, y.shape, strict=False)) > 1  # of attention between all tokens
        if x.dim() != y.dim() or (not is_map and changes(x[*sizes], y[*sizes], 1e-3).any()):
            return f"what the model returns depends on the number of tokens that {layer!r} returns, as a sum does"
    return ""


def _run(
    model: nn.Module, example: Any, layer: str, weights: dict[str, Tensor], training: bool, edit: Edit | None
) -> _Run:
    """Run the model with changed tokens of a layer, or with its own."""
    found = _Run([], [], [], [])
    devices = {x.device.type for x in (*model.parameters(), *tensors(example))} - {"cpu", "meta"}

    def watch(name: str, at: str, value: Any) -> None:
        floats = [x for x in tensors(value) if x.is_floating_point()]
        if name == "":
            found.states.append(rng_states(devices))
            found.results.extend(floats if at == "output" else ())
        if at == "output" and name == layer:
            found.tokens.extend(tensors(value)[:1])
        elif at == "output" and not name.startswith(f"{layer}.") and found.tokens and found.tokens[0].dim() > 1:
            found.outputs.extend((name, _projected(x, found.tokens[0].shape[1])) for x in floats)

    edits = {} if edit is None else {layer: lambda output: map_tensor(output, None, edit)}
    experiment(model, example, watch, edits, training, weights=weights)
    return found


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

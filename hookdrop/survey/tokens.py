"""Find the image patches of a vision transformer, and check that the layers after them do not need all of them.

The patches are the last tensor (N, L, C) before the first attention through which all of the image passes. Tokens that
are equal for two different images are class tokens or registers. Two forwards then show whether patches may be removed:
with the patches in another order, later layers must compute the same in that order, and with fewer patches they must
run. Windows, grids, relative positions and rotary embeddings fail one of both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hookdrop.survey.heads import HIDDEN, attention_cores
from hookdrop.survey.isolation import run_with_hooks
from hookdrop.survey.trace import Node, Trace
from hookdrop.utils.select import named_layers
from hookdrop.utils.tensor_tree import map_tensor, tensors


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
    core = next((op for op in trace.ops if op.name in HIDDEN or op in cores), None)
    if len(images) != 1 or core is None:
        return None
    depends = trace.reached(images) - trace.reached(inputs.keys() - {*images})
    returned = [(call, call.outputs[0]) for call in trace.calls if call.end < core.index and call.outputs]
    tokens = {node for _, node in returned if len(node.shape) == 3 and node.fits and node in depends}
    for last in sorted(tokens, key=lambda node: -node.index):
        if trace.reached(images, gate=last).isdisjoint(trace.calls[0].outputs):  # all of the image passes through it
            call = next(call for call, node in returned if node is last)
            while call.parent is not None and call.parent.outputs[:1] == [last]:
                call = call.parent
            return call.name
    return None


def find_embedding(trace: Trace) -> str | None:
    """Return the layer that looks up the integers that the model is called with; None if there is none."""
    for op in trace.ops:
        if op.name == "embedding" and op.call is not None:
            index = next((node for node in op.inputs if _given(node).leaf == "input"), None)
            if index is not None and any(node.shape[:-1] == index.shape for node in op.call.outputs):
                return op.call.name or None
    return None


def _given(node: Node) -> Node:
    """Return the integers that a tensor of integers is a view or a copy of, or that it is clamped from."""
    while node.op is not None and node.op.name in ("view", "reshape", "flatten", "contiguous", "to", "long", "clamp"):
        node = node.op.inputs[0]
    return node


class _NeededError(Exception):
    """Why the tokens of a layer cannot be removed."""


def removable_patches(model: nn.Module, example: Any, layer: str) -> Patches | str:
    """Return the patches among the tokens (N, L, C) that a layer returns, or why later layers need all of them.

    Args:
        model: the model without wrappers.
        example: two different samples.
        layer: the name of the layer.
    """
    try:
        return _removable_patches(model, example, layer)
    except _NeededError as error:
        return str(error)


def _removable_patches(model: nn.Module, example: Any, layer: str) -> Patches:
    plain = _run(model, example, layer, lambda x: x)
    tokens = plain.tokens
    if tokens is None or tokens.dim() != 3 or len(tokens) != 2:
        raise _NeededError(f"{layer!r} does not return one tensor (N, L, C) in each forward")
    equal = (tokens[0] == tokens[1]).all(-1)
    length, prefix = tokens.shape[1], int(equal.sum())
    if not equal[:prefix].all() or length - prefix < 2:
        raise _NeededError(f"the tokens of {layer!r} that do not depend on the image are not the first ones")
    order = torch.cat([torch.arange(prefix), torch.arange(prefix, length).roll(1 + (length - prefix) // 3)])
    permuted = _tried(model, example, layer, lambda x: x[:, order.to(x.device)], "in another order")
    for (name, before), (_, after) in zip(plain.outputs, permuted.outputs, strict=False):
        if before.shape == order.shape:
            before = before[order.to(before.device)]
        # The order of a sum changes its rounding; a position changes much more than this.
        limit = 1e-3 * before.abs().max().clamp(min=1e-6)
        if before.shape != after.shape or not bool(((before - after).abs() <= limit).all()):
            raise _NeededError(f"{name!r} depends on the position of the tokens that it gets")
    kept = torch.arange(prefix + (length - prefix) // 2)
    _tried(model, example, layer, lambda x: x[:, kept.to(x.device)], "with fewer tokens")
    return Patches(layer, prefix)


@dataclass
class _Run:
    """A forward."""

    tokens: Tensor | None = None
    outputs: list[tuple[str, Tensor]] = field(default_factory=list)
    """Each output after the tokens, by layer, projected to one number for each token, or to one number in total."""


def _run(model: nn.Module, example: Any, layer: str, change: Callable[[Tensor], Tensor]) -> _Run:
    """Run the model with changed tokens."""
    run = _Run()

    def at_layer(module: nn.Module, args: Any, output: Any) -> Any:
        first, run.tokens = run.tokens is None, next(iter(tensors(output)), None)
        if not first:
            raise _NeededError(f"{layer!r} runs several times in a forward")
        return map_tensor(output, None, change)

    def after(name: str) -> Callable[..., None]:
        def save(module: nn.Module, args: Any, output: Any) -> None:
            if run.tokens is not None:
                length = run.tokens.shape[1]
                run.outputs += [(name, _projected(x, length)) for x in tensors(output) if x.is_floating_point()]

        return save

    layers = {found.name: found.module for found in named_layers(model)}
    others = {name: module for name, module in layers.items() if not f"{name}.".startswith(f"{layer}.")}
    # Registered last, so that this changes what a hook of hookdrop would change.
    handles = [layers[layer].register_forward_hook(at_layer)]
    handles += [module.register_forward_hook(after(name)) for name, module in others.items()]
    run_with_hooks(model, example, handles)
    return run


def _tried(model: nn.Module, example: Any, layer: str, change: Callable[[Tensor], Tensor], how: str) -> _Run:
    try:
        return _run(model, example, layer, change)
    except _NeededError:
        raise
    except Exception as error:  # models fail in any way
        reason = "".join(str(error.__cause__ or error).strip().splitlines()[:1])
        raise _NeededError(f"the layers after {layer!r} do not run {how}: {reason}") from error


def _projected(x: Tensor, length: int) -> Tensor:
    """Project a tensor to a number for each token, or, if it has no axis of this length, to one number."""
    axes = [axis for axis, size in enumerate(x.shape) if size == length]
    if len(axes) > 1:
        return x.new_zeros(())  # such as attention maps
    rows = x.movedim(axes[0], 0).flatten(1) if axes else x.reshape(1, -1)
    weights = torch.randn(rows.shape[1], generator=torch.Generator().manual_seed(0)).to(rows)
    return (rows * weights).float().sum(1)

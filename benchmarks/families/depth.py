"""Check the sites of `stochastic_depth`: each is the last layer before an addition, and no branch is missing.

With every site multiplied by 0, a layer has to return its input, or norms of it, bit for bit; some models multiply the
skip by a factor. With one site multiplied by 1 and by 2, its block's sum has to change by a tensor and by twice that
tensor, so no norm or activation follows the site. All vectors and all zero weights are random, so that no branch is
zero because of its initialization.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from families.check import float_tensors, with_first
from families.inputs import BATCH
from families.layers import Run, is_layer, stacks

_NORM = re.compile("norm|^ln|affine", re.IGNORECASE)
_PROJECTIONS = ("downsample", "shortcut", "nin_shortcut", "proj", "layernorm_before")
"""Children of a block on its skip, if the block changes the shape."""
_REPLACES_ITS_INPUT = re.compile("^Sam(HQ)?TwoWayAttentionBlock$")
"""Layers whose first branch has no skip (`skip_first_layer_pe`)."""


@dataclass
class Call:
    """The floating-point tensors that a module receives and returns in its first call, and the norms in it."""

    inputs: list[Tensor]
    outputs: list[Tensor] = field(default_factory=list)
    norms: list[tuple[Tensor, Tensor]] = field(default_factory=list)


@dataclass
class Findings:
    """What the check found: how each layer and block reduces, and problems by the name of the layer."""

    layers: int
    kinds: dict[str, str] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)


def check_sites(
    model: nn.Module,
    runs: Sequence[Run],
    blocks: Mapping[str, Sequence[str]],
    rows: Collection[str],
    inner: Collection[str] = (),
) -> Findings:
    """Check the sites of a model with random vectors.

    Args:
        model: the model, in eval mode.
        runs: forwards that call all layers.
        blocks: the names of the hooked modules, the ends of branches, by the names of the layers around them.
        inner: layers that do not reduce to their input.
        rows: the sites that draw a mask for each row of the first axis, which has to be the batch.
    """
    with randomized(model):
        sites = [end for ends in blocks.values() for end in ends]
        known = {name: ends for name, ends in blocks.items() if [name] != ends}
        found = Findings(sum(len(layers) for _, layers in stacks(model)))
        inside = [name for name, module in model.named_modules() if isinstance(module, nn.Module) and name]
        names = [name for name in inside if name in known or is_layer(model.get_submodule(name))]
        with _scaled(model, dict.fromkeys(sites, 1.0)):
            plain = record(model, runs, [*names, *sites])
        zeros = dict.fromkeys(sites, 0.0)
        with _scaled(model, zeros):
            zeroed = record(model, runs, names)
        for _, layers in stacks(model):
            for name, layer in layers:
                # The blocks of a container that is never called are checked below.
                container = name not in plain and any(block.startswith(f"{name}.") for block in known)
                dropped = name.startswith(tuple(f"{site}." for site in sites))  # a part of a branch
                if not container and not dropped and not _REPLACES_ITS_INPUT.match(type(layer).__name__):
                    _check_layer(name, layer, plain, zeroed, found)
        for name, ends in known.items():
            if name not in zeroed:
                continue
            if name not in found.kinds:
                kind = reduction(zeroed[name]) or _projection(model, runs, name, zeros)
                if kind:
                    found.kinds[name] = kind
                    found.problems.pop(name, None)
                elif name not in inner and not _REPLACES_ITS_INPUT.match(_kind(model, name)):
                    found.problems[name] = f"{_kind(model, name)} does not reduce to its skip"
            for end in ends:
                if end not in plain or end not in rows:
                    continue
                shape = plain[end].outputs[0].shape
                if len(shape) < 3 or shape[0] % BATCH or shape[0] not in (BATCH, plain[name].inputs[0].shape[0]):
                    found.problems[name] = f"the first axis of {end} {tuple(shape)} is not the batch"
        found.problems |= _check_scale(model, runs, known, zeroed, set(plain), inner)
        return found


def _check_layer(
    name: str, layer: nn.Module, plain: Mapping[str, Call], zeroed: Mapping[str, Call], found: Findings
) -> None:
    """Check that a layer reduces to its skip, or that all layers inside it do."""
    inner = [pair for _, layers in stacks(layer, f"{name}.") for pair in layers]
    if isinstance(layer, nn.ModuleList):
        inner = [(f"{name}.{index}", child) for index, child in layer.named_children()]
    kind = reduction(zeroed[name]) if name in zeroed else ""
    if kind and not reduction(plain[name]):
        found.kinds[name] = kind
    elif inner:
        for inner_name, child in inner:
            _check_layer(inner_name, child, plain, zeroed, found)
    else:
        found.problems[name] = f"{type(layer).__name__} does not reduce to its skip"


def _check_scale(
    model: nn.Module,
    runs: Sequence[Run],
    known: Mapping[str, Sequence[str]],
    zeroed: Mapping[str, Call],
    called: Collection[str],
    inner: Collection[str],
) -> dict[str, str]:
    """Return the problems of sites that a norm or another nonlinear function follows, one of each kind."""
    problems: dict[str, str] = {}
    layers = tuple(f"{name}." for _, found in stacks(model) for name, _ in found)
    # Blocks outside of the layers are those of a convolutional backbone, in which a ReLU follows the addition.
    tested = {name: ends for name, ends in known.items() if f"{name}.".startswith(layers) and name not in inner}
    pairs = [(name, end) for name, ends in tested.items() for end in ends if {name, end} <= set(called)]
    first = {(_kind(model, name), end.removeprefix(name)): (name, end) for name, end in pairs}
    for name, end in first.values():
        calls = [zeroed[name]]
        for factor in (1.0, 2.0):
            factors = {site: factor if site == end else 0.0 for ends in known.values() for site in ends}
            with _scaled(model, factors, first=True):
                calls.append(record(model, runs, [name])[name])
        none, once, twice = (_sum_after(call, calls) for call in calls)
        change = once - none
        rounding = 4 * torch.finfo(torch.float32).eps * float(none.abs().max())
        linear = torch.allclose(twice - none, 2 * change, rtol=1e-3, atol=1e-3 * float(change.std()) + rounding)
        if not linear or not change.any():
            problems[name] = f"{end} is not the last layer before the addition in {_kind(model, name)}"
    return problems


def _sum_after(call: Call, calls: Sequence[Call]) -> Tensor:
    """Return the first sum that a site changes: the input of the next norm on the skip, or the output of the block."""
    skip = list(calls[0].inputs)
    for index, (x, _) in enumerate(call.norms):
        values = [other.norms[index][0] for other in calls]
        if any(_same(x, values[0]) or _is_multiple(x, values[0]) for x in skip):
            skip.append(calls[0].norms[index][1])
            if not all(_same(values[0], value) for value in values[1:]):
                return x.double()
    return call.outputs[0].double()


def record(model: nn.Module, runs: Sequence[Run], names: Sequence[str]) -> dict[str, Call]:
    """Record the first call of each of these modules."""
    calls: dict[str, Call] = {}
    active: list[str] = []

    def recorded(name: str, forward: Any) -> Any:
        def run_forward(*args: Any, **kwargs: Any) -> Any:
            if name in calls:
                return forward(*args, **kwargs)
            calls[name] = Call([x.clone() for x in float_tensors((args, kwargs))])
            active.append(name)
            output = forward(*args, **kwargs)
            calls[name].outputs = [x.clone() for x in float_tensors(output)]
            active.remove(name)
            return output

        return run_forward

    def norm(module: nn.Module, args: Any, output: Any) -> None:
        if args and isinstance(args[0], Tensor) and (results := float_tensors(output)):
            pair = (args[0].clone(), results[0].clone())
            for name in active:
                calls[name].norms.append(pair)

    with ExitStack() as stack:
        for name in dict.fromkeys(names):
            module = model.get_submodule(name)
            # Not hooks: SqueezeBERT calls the forward of its layers.
            stack.enter_context(patch.object(module, "forward", recorded(name, module.forward)))
        for module in model.modules():
            if _NORM.search(type(module).__name__) and not any(list(child.parameters()) for child in module.children()):
                stack.callback(module.register_forward_hook(norm).remove)
        torch.manual_seed(0)
        with torch.no_grad():
            for run in runs:
                run()
    return calls


def reduction(call: Call) -> str:
    """Return "input", "norm" or "scaled" if the output is the input, norms of it, or a multiple; "" otherwise."""
    if not call.outputs:
        return ""
    output = call.outputs[0]
    if any(_same(x, output) for x in call.inputs):
        return "input"
    reachable = list(call.inputs)
    for before, after in call.norms:
        if any(_same(x, before) for x in reachable):
            reachable.append(after)
        elif any(_is_multiple(x, before) for x in reachable):
            reachable += [before, after]
    if any(_same(x, output) for x in reachable):
        return "norm"
    return "scaled" if any(_is_multiple(x, output) for x in reachable) else ""


def _projection(model: nn.Module, runs: Sequence[Run], name: str, factors: Mapping[str, float]) -> str:
    """Return "projection" if the output of a block without its branches depends only on weights on the skip."""
    block = model.get_submodule(name)
    outputs: list[Tensor] = []
    with ExitStack() as stack:
        stack.callback(block.register_forward_hook(lambda module, args, out: outputs.extend(float_tensors(out))).remove)
        stack.enter_context(_scaled(model, factors))
        for run in runs:
            run()
    weights = {key: p for key, p in block.named_parameters() if p.requires_grad}
    if not outputs or not outputs[0].requires_grad:
        return ""
    gradients = torch.autograd.grad(outputs[0].square().sum(), list(weights.values()), allow_unused=True)
    used = [key for key, gradient in zip(weights, gradients, strict=True) if gradient is not None and gradient.any()]
    return "projection" if used and all(key.startswith(_PROJECTIONS) for key in used) else ""


@contextmanager
def _scaled(model: nn.Module, factors: Mapping[str, float], first: bool = False) -> Iterator[None]:
    """Multiply the outputs of these modules by a factor each; with `first`, those of all but the first call by 0."""
    called: set[str] = set()

    def hook(name: str) -> Any:
        def scale(module: nn.Module, args: Any, output: Any) -> Any:
            factor = 0.0 if first and name in called else factors[name]
            called.add(name)
            return with_first(output, lambda x: x * factor)

        return scale

    with ExitStack() as stack:
        for name in factors:
            stack.callback(model.get_submodule(name).register_forward_hook(hook(name)).remove)
        yield


@contextmanager
def randomized(model: nn.Module) -> Iterator[None]:
    """Add noise to all vectors, and to weights that are zero, so that no branch is zero; restore them at the end."""
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(1)
    try:
        with torch.no_grad():
            for p in model.parameters():
                if p.is_floating_point() and (p.numel() == max(p.shape, default=1) or not p.any()):
                    p.add_(torch.randn(p.shape, generator=generator).to(p) * 0.1)
        yield
    finally:
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(weights[name])


def _same(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and torch.equal(x, y)


def _is_multiple(x: Tensor, y: Tensor) -> bool:
    """Whether `y` is `x` times one factor for each channel."""
    if x.shape != y.shape or x.dim() < 2 or not x.any() or not y.any():
        return False
    x, y = x.flatten(0, -2).double(), y.flatten(0, -2).double()
    factor = (x * y).sum(0) / x.square().sum(0).clamp_min(1e-30)
    return torch.allclose(y, factor * x, rtol=1e-4, atol=1e-5 * float(y.abs().max()))


def _kind(model: nn.Module, name: str) -> str:
    return type(model.get_submodule(name)).__name__

"""Checks of the sites of `stochastic_depth`: each is the last layer before a residual addition, and none is missing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from families.check import float_tensors
from families.inputs import BATCH
from families.layers import Run, stacks
from hookdrop.utils.tensor_tree import map_tensor
from hookdrop.recipes.branches import blocks

_NORM = re.compile("norm|^ln|batchnorm|affine", re.IGNORECASE)


@dataclass
class Call:
    """What a module received and returned in one call."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    norms: list[tuple[Tensor, Tensor]] = field(default_factory=list)


class Sites:
    """Hooks at the sites that multiply the tensors by a factor for each site."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self.model, self.names = model, list(names)
        self.factors = dict.fromkeys(names, 1.0)
        self.seen: dict[str, list[Tensor]] = {}

    @contextmanager
    def placed(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name in self.names:
                def hook(module, args, output, name=name):
                    def scale(x):
                        self.seen.setdefault(name, []).append(x)
                        return x * self.factors[name]
                    return map_tensor(output, None, scale)
                stack.callback(self.model.get_submodule(name).register_forward_hook(hook).remove)
            yield


def randomize(model: nn.Module) -> None:
    """Give every vector and zero parameter a random value: a branch must not be zero because of its initialization."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if not p.is_floating_point(): continue
            noise = torch.randn(p.shape, generator=generator) * 0.1
            if p.dim() <= 1 or p.numel() == max(p.shape) or not p.any():
                p.add_(noise.to(p))


@torch.no_grad()
def record(model: nn.Module, runs: Sequence[Run], names: Sequence[str]) -> dict[str, Call]:
    """Record the first call of each of these modules, with the norms inside."""
    calls: dict[str, Call] = {}
    open_calls: list[str] = []
    with ExitStack() as stack:
        for name in names:
            module = model.get_submodule(name)
            def before(module, args, kwargs, name=name):
                if name not in calls:
                    calls[name] = Call([x.clone() for x in float_tensors((args, kwargs))], [])
                    open_calls.append(name)
            def after(module, args, kwargs, output, name=name):
                if name in open_calls:
                    calls[name].outputs = [x.clone() for x in float_tensors(output)]
                    open_calls.remove(name)
            stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(after, with_kwargs=True).remove)
        for module in model.modules():
            if _NORM.search(type(module).__name__) and not any(True for _ in module.children()):
                def norm(module, args, output):
                    if args and isinstance(args[0], Tensor) and isinstance(output, Tensor):
                        for name in open_calls:
                            calls[name].norms.append((args[0].clone(), output.clone()))
                stack.callback(module.register_forward_hook(norm).remove)
        torch.manual_seed(0)
        for run in runs:
            run()
    return calls


def reduces_to_skip(call: Call) -> str:
    """Return "input", "norm" or "scaled" if the output is a function of the input and of norms alone; else ""."""
    if not call.outputs:
        return ""
    output = call.outputs[0]
    if any(same(x, output) for x in call.inputs):
        return "input"
    reachable, kind = list(call.inputs), "norm"
    for before, after in call.norms:
        if any(same(x, before) for x in reachable):
            reachable.append(after)
        elif any(is_multiple(x, before) for x in reachable):
            reachable += [before, after]
    if any(same(x, output) for x in reachable):
        return "norm"
    return "scaled" if any(is_multiple(x, output) for x in reachable) else ""


def same(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and torch.equal(x, y)


def is_multiple(x: Tensor, y: Tensor) -> bool:
    """Whether `y` is `x` times one factor for each channel."""
    if x.shape != y.shape or x.dim() < 2 or not x.any() or not y.any():
        return False
    x, y = x.flatten(0, -2).double(), y.flatten(0, -2).double()
    ratio = (x * y).sum(0) / (x * x).sum(0).clamp_min(1e-30)
    return torch.allclose(y, ratio * x, rtol=1e-4, atol=1e-5 * float(y.abs().max()))


def check(model: nn.Module, runs: Sequence[Run], sites: Sequence[str], rows: bool = True) -> dict[str, Any]:
    randomize(model)
    model.eval()
    tool = Sites(model, sites)
    known = {block.name: [f"{block.name}.{end}" for end in ends] for block, ends in blocks(model)}
    known = {name: ends for name, ends in known.items() if set(ends) <= set(sites)}
    layers = [name for _, found in stacks(model) for name, _ in found]
    inner = [name for name, module in model.named_modules() if name not in layers and any(name.startswith(f"{l}.") for l in layers) and any(True for _ in module.children())]
    names = list(dict.fromkeys([*layers, *known, *inner]))
    with tool.placed():
        plain = record(model, runs, names)
        shapes = {n: tuple(x[0].shape) for n, x in tool.seen.items()}
        tool.factors = dict.fromkeys(sites, 0.0)
        zeroed = record(model, runs, names)
    kinds: dict[str, str] = {}
    def verify(name: str, module: nn.Module) -> list[str]:
        """Return the problems of a layer, or of the layers inside it."""
        if isinstance(module, nn.ModuleList):
            return [p for index, child in module.named_children() for p in verify(f"{name}.{index}", child)]
        if name not in zeroed:
            return [f"{name} was not called"] if not nested(name, module) else nested_problems(name, module)
        if reduces_to_skip(plain[name]):
            return [f"{name} is its skip even without hooks"]
        kind = reduces_to_skip(zeroed[name])
        if kind:
            kinds[name] = kind
            return []
        return nested_problems(name, module)
    def nested(name, module):
        return [pair for _, found in stacks(module, f"{name}.") for pair in found]
    def nested_problems(name, module):
        below = nested(name, module)
        if not below:
            return [f"{name} ({type(model.get_submodule(name)).__name__}) does not reduce to its skip"]
        return [p for n, m in below for p in verify(n, m)]
    problems = [p for _, found in stacks(model) for n, m in found for p in verify(n, m)]
    for name, ends in known.items():
        if ends and name in zeroed and name not in kinds:
            kind = reduces_to_skip(zeroed[name])
            if not kind: problems.append(f"block {name} ({type(model.get_submodule(name)).__name__}) does not reduce to its skip")
            else: kinds[name]=kind
    batch = [n for n, s in shapes.items() if s[0] % BATCH or len(s) < 3]
    if batch and rows: problems.append(f"axis 0 is not the batch: {batch[0]} {shapes[batch[0]]}")
    return {"layers": len(layers), "kinds": kinds, "problems": problems, "shapes": shapes}

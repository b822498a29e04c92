"""The layers of a model and its runs, found without the recipes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from families.inputs import Inputs, attempts

_MIXERS = re.compile("attention|attn|mixer|mamba|ssm|recurrent|rwkv|lstm|deltanet|retention|fourier", re.IGNORECASE)
_LISTS = (nn.ModuleList, nn.Sequential)


@dataclass
class Run:
    """A forward of a part of a model, or of the whole model (name "")."""

    name: str
    module: nn.Module
    inputs: Inputs

    def __call__(self) -> Any:
        """Run the part."""
        return self.module(**self.inputs)


def mixes_tokens(module: nn.Module) -> bool:
    """Whether the class name of the module or of one inside it says that it mixes tokens."""
    return any(_MIXERS.search(type(part).__name__) for part in module.modules())


def stacks(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, list[tuple[str, nn.Module]]]]:
    """Yield the outermost lists of layers that mix tokens, each with its layers by full name."""
    for name, module in model.named_children():
        full = f"{prefix}{name}"
        if isinstance(module, _LISTS):
            layers = [(f"{full}.{index}", child) for index, child in module.named_children() if is_layer(child)]
            if layers:
                yield full, layers
                continue
        yield from stacks(module, f"{full}.")


def is_layer(module: nn.Module) -> bool:
    """Whether a module has parts, of which one mixes tokens. A single attention is not a layer."""
    children = list(module.children())
    return bool(children) and mixes_tokens(module) and any(isinstance(part, nn.Linear | nn.Conv1d | nn.Conv2d) or "Conv1D" in type(part).__name__ for part in module.modules())


def find_runs(model: PreTrainedModel) -> tuple[list[Run], list[str], str]:
    """Return runs that call as many layers as possible, the stacks with layers that no run calls, and an error."""
    waiting = {name: [module for _, module in layers] for name, layers in stacks(model)}
    runs: list[Run] = []
    error = ""
    parts = [(name, part) for name, part in model.named_modules() if isinstance(part, PreTrainedModel)]
    for name, part in parts:
        mine = [stack for stack in waiting if f"{stack}.".startswith(f"{name}." if name else "")]
        if not mine and (runs or waiting):
            continue
        found, reason = first_run(name, part)
        error = error or reason
        if found is None:
            continue
        run, called = found
        before = len(waiting)
        for stack in mine:
            if all(any(layer is one or contains(layer, one) for one in called) for layer in waiting[stack]):
                del waiting[stack]
        if len(waiting) < before or not runs:
            runs.append(run)
        if not waiting:
            break
    return runs, list(waiting), error


def contains(outer: nn.Module, inner: nn.Module) -> bool:
    return any(part is inner for part in outer.modules())


def first_run(name: str, part: PreTrainedModel) -> tuple[tuple[Run, list[nn.Module]] | None, str]:
    """Return the first run of a part that raises no error, with the modules that it calls, and the first error."""
    reason = ""
    torch.manual_seed(0)
    best: tuple[Run, list[nn.Module]] | None = None
    for count, inputs in enumerate(attempts(part)):
        run = Run(name, part.eval(), inputs)
        called: list[nn.Module] = []
        with torch.no_grad(), watching(part, called):
            try:
                run()
            except Exception as error:
                reason = reason or f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:200]
                continue
        return (run, called), reason
    return None, reason or "no inputs"


@contextmanager
def watching(model: nn.Module, called: list[nn.Module]) -> Iterator[None]:
    """Append every module that is called to `called`."""
    with ExitStack() as stack:
        for module in model.modules():
            handle = module.register_forward_hook(lambda module, args, output: called.append(module))
            stack.callback(handle.remove)
        yield

"""The layers of a model and forwards that call all of them, found without the recipes."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers import PreTrainedModel

from families.inputs import Inputs, attempts
from models.check import first_line
from models.footprint import tensors

MIXERS = re.compile("attention|attn|mla$|mixer|mamba|ssm|recurrent|rwkv|deltanet|retention|fourier", re.IGNORECASE)
_LISTS = (nn.ModuleList, nn.Sequential)

Layers = list[tuple[str, nn.Module]]


@dataclass
class Run:
    """A forward of the model, or of the part of this name."""

    name: str
    module: nn.Module
    inputs: Inputs

    def __call__(self) -> Any:
        return self.module(**self.inputs)


def float_tensors(value: Any) -> list[Tensor]:
    return [x for x in tensors(value) if x.is_floating_point()]


def with_first(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return a value with a function applied to its first floating-point tensor."""
    leaves, spec = tree_flatten(value)
    first = next(i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.is_floating_point())
    leaves[first] = function(leaves[first])
    return tree_unflatten(leaves, spec)


def stacks(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, Layers]]:
    """Yield the outermost lists of layers by name, each with its layers by full name."""
    for name, module in model.named_children():
        full = f"{prefix}{name}"
        children = module.named_children() if isinstance(module, _LISTS) else ()
        layers = [(f"{full}.{index}", child) for index, child in children if is_layer(child)]
        if layers:
            yield full, layers
        else:
            yield from stacks(module, f"{full}.")


def is_layer(module: nn.Module) -> bool:
    """Whether a module has weights and one part that mixes tokens, by class name; an attention alone is no layer."""
    return bool(attentions(module)) and any(p.dim() > 1 for p in module.parameters())


def attentions(model: nn.Module) -> set[str]:
    """Return the class names of the modules that mix tokens."""
    classes = {type(part).__name__ for part in model.modules() if part is not model}
    return {name for name in classes if MIXERS.search(name)}


def find_runs(model: PreTrainedModel) -> tuple[list[Run], list[str], str]:
    """Run the model, and each part that is a model itself and has layers that no run has called.

    Returns:
        The runs, the names of the stacks with layers that none of them calls, and the first error of an attempt.
    """
    waiting = dict(stacks(model))
    runs: list[Run] = []
    error = ""
    for name, part in model.named_modules():
        prefix = f"{name}." if name else ""
        mine = [stack for stack in waiting if f"{stack}.".startswith(prefix)]
        if not isinstance(part, PreTrainedModel) or not mine:
            continue
        run, called, reason = _first_run(name, part)
        error = error or reason
        done = [stack for stack in mine if all(called & {*map(id, layer.modules())} for _, layer in waiting[stack])]
        if run is not None and done:
            runs.append(run)
            waiting = {stack: layers for stack, layers in waiting.items() if stack not in done}
    return runs, list(waiting), error


def _first_run(name: str, part: PreTrainedModel) -> tuple[Run | None, set[int], str]:
    """Return the first run without an error, the ids of the modules that it calls, and the first error."""
    reason = ""
    torch.manual_seed(0)
    for inputs in attempts(part):
        run, called = Run(name, part.eval(), inputs), set[int]()
        hook = register_module_forward_hook(lambda module, *_, called=called: called.add(id(module)))
        with torch.no_grad(), hook:
            try:
                run()
            except Exception as error:  # models reject inputs with any kind of error
                reason = reason or first_line(error)[:200]
                continue
        return run, called, reason
    return None, set(), reason or f"no value for an argument of {type(part).__name__}.forward"

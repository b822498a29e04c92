"""Which layers feel a regularizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hookdrop.core.handle import Injection
from hookdrop.core.selection import Entries, unwrapped
from hookdrop.core.tables import text_table
from hookdrop.core.tensor_tree import first_tensor, map_tensor
from hookdrop.measure.measurement import measured_gradients, why_idle
from hookdrop.observe.capturing import Seen, capture
from hookdrop.survey.isolation import call

KINDS = ("output", "gradient")


def mean_square(output: Any) -> Tensor:
    """Return a loss for `compare` that needs no targets: the mean square of the first tensor."""
    return first_tensor(output).float().square().mean()


def compare(
    model: nn.Module,
    x: Any,
    drop: Injection,
    layers: Entries = "**",
    *,
    exclude: Entries | None = (),
    loss: Callable[[Any], Tensor] = mean_square,
) -> Comparison:
    """Measure how much an injection changes outputs and gradients of each layer, in training mode under one seed.

    The model, its gradients, buffers, modes and random state are restored. If the model has dropout, its masks
    after a site differ between the two runs, because the regularizer draws first.

    Args:
        model: the model of the injection.
        x: its input, as `example_input` of `inject`.
        drop: the injection, at its current rate.
        layers, exclude: which layers, as in `inject`.
        loss: maps the output of the model to a number, for the gradients: the mean square of its first tensor.

    Returns:
        The relative differences by layer; `print` it.
    """
    if not isinstance(drop, Injection):
        raise TypeError(f"compare: drop must be an Injection, got {type(drop).__name__}.\n  compare(model, x, drop)")
    inner, runs, idle = unwrapped(model), list[capture](), ""
    for context in (nullcontext(), drop.disabled()):
        with measured_gradients(model):
            for module in [] if inner.training else inner.modules():
                module.training = True
            with context, _Run(inner, layers, exclude) as seen:
                if (total := loss(call(inner, x))).requires_grad:
                    torch.autograd.backward(total)
            sink = drop._sinks[0]
            acts = sink.state.on and sink.p != sink.rate.neutral and getattr(sink, "called", True)
            idle = idle or ("it changes nothing in these layers" if acts else why_idle(sink))
        runs.append(seen)
    pairs = {name: (runs[0][name], runs[1][name]) for name in runs[0] if name in runs[1]}
    found = Comparison({name: Difference(*(_relative(kind, *pair) for kind in KINDS)) for name, pair in pairs.items()})
    if all(value == 0.0 for difference in found.values() for value in difference):
        found.note = f"nothing differs: {idle}"
    return found


class Difference(NamedTuple):
    """How much an injection changes a layer: the norm of the difference, divided by that without the injection.

    It is None if the shapes differ. Unrelated tensors of the same norm differ by sqrt(2).
    """

    output: float | None
    gradient: float | None


class Comparison(dict[str, Difference]):
    """The differences by layer; `print` it for a table."""

    note = ""

    def __repr__(self) -> str:
        rows = [(name or "the model", *difference) for name, difference in self.items()]
        return "\n".join([text_table(("layer", "output", "gradient"), rows), self.note]).rstrip()


class _Run(capture):
    """Captures one run. The first layers get an output that requires gradients, since no parameter does."""

    def __init__(self, model: nn.Module, layers: Entries, exclude: Entries | None) -> None:
        super().__init__(model, layers, exclude=exclude, what=KINDS)

    def _after(self, name: str, module: nn.Module, args: Any, output: Any) -> Any:
        if self.chosen(name, output, None):
            output = map_tensor(output, None, lambda x: x if x.requires_grad else x.detach().requires_grad_().clone())
        super()._after(name, module, args, output)
        return output


def _relative(kind: str, one: Seen, other: Seen) -> float | None:
    a, b = one.tensors[kind].get(0), other.tensors[kind].get(0)
    if a is None or b is None or a.shape != b.shape:
        return None
    difference, scale = float((a.double() - b.double()).norm()), float(b.double().norm())
    return difference / scale if scale else math.inf if difference else 0.0

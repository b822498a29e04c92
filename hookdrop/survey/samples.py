"""Find which axis of the example has the samples, and which rows of a tensor belong to which of them.

Traces with two and with three samples show which axis grows with the batch, and by how many rows for each sample. An
experiment shows the rest: one of the samples is replaced. No row of the others may change, so an axis of the example
that fails this is not the batch. If a sample has several rows, as in windows, frames or time steps, the rows that
change show their order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hookdrop.core.tensor_tree import first_tensor
from hookdrop.survey.examples import Example
from hookdrop.survey.experiment import changes, experiment
from hookdrop.survey.ops import CONVS, COPIES
from hookdrop.survey.trace import Call, Node, Trace

Site = tuple[str, str]
"""The name of a layer, and its input or output."""


@dataclass(frozen=True)
class Samples:
    """The rows of a tensor that belong to each sample of the batch."""

    axis: int = 0
    """The axis that grows with the batch."""
    per_sample: int = 1
    """The number of its rows for each sample, with the example."""
    interleaved: bool = False
    """Whether sample i has the rows i, i + N, ..., as in (T N), and not consecutive ones, as in (N T)."""
    module: str | None = None
    """The innermost module around the layer whose first input, preferably of floating-point numbers, has one row for
    each sample. None if it is not needed, because the tensor has one row for each sample too."""

    @property
    def argument(self) -> tuple[str | None, int, bool] | None:
        """The argument `samples` of a regularizer; None for the usual place, one row of axis 0 for each sample."""
        return None if self == Samples() else (self.module, self.axis, self.interleaved)

    def __str__(self) -> str:
        if self.per_sample == 1:
            return f"N on axis {self.axis}"
        return f"{self.per_sample} {'interleaved' if self.interleaved else 'consecutive'} rows of axis {self.axis} each"


def growing_axis(two: Trace, three: Trace, name: str, at: str) -> Samples | str:
    """Return the axis and the rows per sample of a layer's first tensor, or why they are unknown."""
    pairs = list(zip(two.calls_of.get(name, []), three.calls_of.get(name, []), strict=False))
    nodes = [[call.outputs if at == "output" else call.inputs for call in pair] for pair in pairs]
    found = dict.fromkeys(_growing(_shape(a), _shape(b)) for a, b in nodes)
    known = [one for one in found if isinstance(one, Samples)]
    if len(known) < len(found) or not known:
        return next((one for one in found if isinstance(one, str)), "it is never called with the example")
    if len({one.axis for one in known}) > 1:
        return "its calls have the batch on different axes"
    most = max(known, key=lambda one: one.per_sample)
    if most.per_sample == 1:
        return most
    module = _module_with_batch(*pairs[0])
    if module is None:
        return f"axis {most.axis} has {most.per_sample} rows for each sample, and no module around it gets the batch"
    return replace(most, module=module)


def _shape(nodes: Iterable[Node]) -> tuple[int, ...]:
    """Return the shape of the first tensor that fits."""
    return next((node.shape for node in nodes if node.fits), ())


def _growing(two: tuple[int, ...], three: tuple[int, ...]) -> Samples | str:
    shapes = f"{two} for 2 samples, {three} for 3"
    axes = [axis for axis, sizes in enumerate(zip(two, three, strict=False)) if sizes[0] != sizes[1]]
    if not two or not three:
        return "it has no floating-point tensor"
    if len(two) != len(three) or len(axes) != 1:
        return f"not one axis grows with the batch: {shapes}"
    axis = axes[0]
    if three[axis] * 2 != two[axis] * 3:
        return f"axis {axis} does not grow in proportion to the batch: {shapes}"
    return Samples(axis, two[axis] // 2)


def _module_with_batch(two: Call, three: Call) -> str | None:
    """Return the innermost call around a layer whose first input has one row of axis 0 for each sample."""
    for outer, other in zip(two.around(), three.around(), strict=False):
        inputs = [sorted(call.inputs, key=lambda node: not node.fits) for call in (outer, other)]
        sizes = [nodes[0].shape[:1] for nodes in inputs if nodes]
        if outer is not two and sizes == [(2,), (3,)]:
            return outer.name
    return None


def is_batched(trace: Trace) -> bool:
    """Whether a convolution reads the example as a batch: axis 0 has the samples, or parts of one, as in a bag."""
    for op in trace.ops:
        if op.name in CONVS and len(op.inputs[0].shape) == len(op.inputs[1].shape):
            x = op.inputs[0]
            while x.op is not None and x.op.name in _BY_ROW and x.op.inputs[0].shape[:1] == x.shape[:1]:
                x = x.op.inputs[0]
            if x.leaf == "input":
                return True
    return False


_BY_ROW = COPIES | {"add", "sub", "mul", "div", "clamp", "pad", "interpolate"}


def row_orders(model: nn.Module, example: Example, two: Trace, three: Trace) -> dict[Site, bool | str]:
    """Return whether the rows of each sample are interleaved at each site that grows with the batch, or why not.

    Of tensors with one row for each sample, only outputs are looked at.
    """
    every = [((name, at), growing_axis(two, three, name, at)) for name in three.calls_of for at in ("output", "input")]
    known = {site: one for site, one in every if isinstance(one, Samples)}
    sites = {site: one for site, one in known.items() if site[1] == "output" or one.per_sample > 1}

    def run(value: Any) -> dict[Site, list[Tensor]]:
        seen: dict[Site, list[Tensor]] = {site: [] for site in sites}

        def watch(name: str, at: str, value: Any) -> None:
            if (name, at) in sites:
                rows = first_tensor(value).detach().movedim(sites[name, at].axis, 0).flatten(1).float()
                # Two numbers for each row.
                seen[name, at].append(torch.stack([rows.sum(1), rows.square().sum(1)]).cpu())

        experiment(model, value, watch, edits={})
        return seen

    whole, replaced, index, size = example.one_replaced()
    before, after = run(whole), run(replaced)
    return {site: _order(before[site], after[site], index, size) for site in sites}


def _order(before: Sequence[Tensor], after: Sequence[Tensor], index: int, size: int) -> bool | str:
    """Return whether the rows that change are those of one of `size` samples in the interleaved order."""
    found: set[bool] = set()
    for x, y in zip(before, after, strict=False):
        if x.shape != y.shape or x.shape[1] % size:
            return "the number of its rows depends on the values"
        changed = changes(x, y, 1e-4).any(0)
        rows = torch.arange(len(changed), device=changed.device)
        fits = [bool(mine[changed].all()) for mine in (rows // (len(rows) // size) == index, rows % size == index)]
        if not any(fits):
            return MIXED
        if changed.any() and (len(rows) == size or not all(fits)):
            found.add(not fits[0])
    if len(found) != 1:
        return UNSEEN if not found else "the order of its rows differs between calls"
    return found.pop()


MIXED = "its rows depend on several samples"
UNSEEN = "the order of its rows cannot be seen"


def why_no_batch(orders: Mapping[Site, bool | str], two: Trace, three: Trace) -> str:
    """Return why the axis along which the example grew does not have independent samples; empty if it does."""
    shape = _shape(two.outputs)
    if shape and shape == _shape(three.outputs):
        return "the output of the model does not grow with it"
    for (name, at), order in orders.items():
        found = growing_axis(two, three, name, at)
        if order == MIXED and isinstance(found, Samples) and found.per_sample == 1:
            return f"a change of one row changes others at {name!r}" if name else "the model mixes its rows"
    return "no change of it can be seen in any layer" if {*orders.values()} == {UNSEEN} else ""

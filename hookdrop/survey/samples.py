"""Find which rows of a tensor belong to which sample of the batch.

Traces with two and with three samples show which axis grows with the batch, and by how many rows for each sample. If
there are several, as in windows, frames or time steps, two passes show their order: one sample is replaced, and
either the first rows change, or every second one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hookdrop.survey.isolation import run_with_hooks
from hookdrop.survey.trace import Call, Trace
from hookdrop.utils.select import layers_by_name
from hookdrop.utils.tensor_tree import first_tensor, map_leaves

PLACES = ("output", "input")
Site = tuple[str, str, int]
"""The name of a layer, its input or output, and the axis with the samples."""


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
    """The innermost module around the layer whose first input has one row for each sample. None if it is not needed,
    because the tensor has one row for each sample too."""

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
    found = {_growing(_shape(a, at), _shape(b, at)) for a, b in pairs}
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


def _shape(call: Call, at: str) -> tuple[int, ...]:
    nodes = call.outputs if at == "output" else call.inputs
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
        sizes = [call.inputs[0].shape[:1] for call in (outer, other) if call.inputs]
        if outer is not two and sizes == [(2,), (3,)]:
            return outer.name
    return None


def row_orders(model: nn.Module, example: Any, sites: Iterable[Site]) -> dict[Site, bool | str]:
    """Return whether the rows of each sample are interleaved at each site, or why it is unknown.

    `example` has two different samples; the sites have more than one row for each sample.
    """
    sites = list(sites)

    def replaced(leaf: Any) -> Any:
        return leaf[[1, 1]] if isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == 2 else leaf

    before, after = (_row_values(model, value, sites) for value in (example, map_leaves(example, replaced)))
    return {site: _order(before[site], after[site]) for site in sites}


def _row_values(model: nn.Module, example: Any, sites: Iterable[Site]) -> dict[Site, list[Tensor]]:
    """Return two numbers for each row of each call."""
    found: dict[Site, list[Tensor]] = {site: [] for site in sites}

    def save(site: Site, value: Any) -> None:
        rows = first_tensor(value).detach().movedim(site[2], 0).flatten(1).float()
        found[site].append(torch.stack([rows.sum(1), rows.square().sum(1)]).cpu())

    def watch(site: Site, module: nn.Module) -> Any:
        if site[1] == "output":
            return module.register_forward_hook(lambda module, args, output: save(site, output))
        return module.register_forward_pre_hook(lambda module, *given: save(site, given), with_kwargs=True)

    layers = layers_by_name(model)
    run_with_hooks(model, example, [watch(site, layers[site[0]].module) for site in found])
    return found


def _order(before: Sequence[Tensor], after: Sequence[Tensor]) -> bool | str:
    """Return whether the rows that change are those of the first of two samples in the interleaved order."""
    found: set[bool] = set()
    for x, y in zip(before, after, strict=False):
        if x.shape != y.shape:
            return "the number of its rows depends on the values"
        scale = x.abs().amax(1, keepdim=True)
        changed = ((x - y).abs() > 1e-4 * scale).any(0)
        rows = torch.arange(len(changed))
        fits = [bool(mine[changed].all()) for mine in (rows < len(rows) // 2, rows % 2 == 0)]
        if changed.any() and sum(fits) == 0:
            return "its rows depend on several samples"
        if sum(fits) == 1:
            found.add(fits[1])
    if len(found) != 1:
        return "the order of its rows cannot be seen" if not found else "the order of its rows differs between calls"
    return found.pop()

"""Find which arguments of a residual branch have a row for each sample, by running it on some of the samples.

The size of an axis does not tell: a table of positions may have as many rows as the batch. With the right arguments
selected, the branch returns for some samples what it returns for them in the whole batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hookdrop.survey.isolation import restored_after, set_eval
from hookdrop.utils.errors import ShapeError
from hookdrop.utils.tensor_tree import TensorKey, describe, map_leaves, map_tensor, tensors, with_rows


class Subset(NamedTuple):
    """What a branch needs in order to run on some of the samples."""

    arguments: frozenset[int]  #: Which of the tensors in its arguments have a row for each sample, by their order.
    outputs: int  #: How many tensors it returns.
    further: str  #: What it returns besides its result that depends on the samples; empty for nothing.


def find_subset(branch: nn.Module, value: tuple[Any, Any], x: Tensor, tensor: TensorKey) -> Subset:
    """Call a branch with its arguments `value` in eval mode, for all samples of `x` and for some; restore its state.

    `tensor` is that of `inject`: which tensor in the output is the result.

    Raises:
        ShapeError: the branch does not return the same for some samples as for all, whichever arguments are selected.
    """
    given, samples = tensors(value), len(x)
    # Neither 1 nor as many as the samples, so that no wrong shape can be broadcast.
    rows = torch.arange(2 if samples > 2 else 3, device=x.device).flip(0) % samples
    groups: dict[Any, list[int]] = {}
    for index, leaf in enumerate(given):
        if leaf.dim() > 0 and len(leaf) == samples:
            groups.setdefault("x" if leaf is x else (leaf.shape, leaf.dtype), []).append(index)
    mine = groups.pop("x")
    results, others = _run(branch, value, (), rows, tensor)
    reason: Exception | None = None
    for chosen in itertools.product((True, False), repeat=len(groups)):
        arguments = frozenset(mine).union(*itertools.compress(groups.values(), chosen))
        try:
            some, other = _run(branch, value, arguments, rows, tensor)
        except Exception as error:  # a shape that does not fit, or any other
            reason = error
            continue
        same = (len(results), len(others)) == (len(some), len(other))
        if same and all(len(y) == samples and _equal(y[rows], part) for y, part in zip(results, some, strict=True)):
            further = [y for y, part in zip(others, other, strict=True) if not _equal(y, part)]
            return Subset(arguments, len(results) + len(others), ", ".join(map(describe, further)))
    raise ShapeError(
        f"got {describe(value)}: for {len(rows)} of the {samples} samples, the branch returns something else than for "
        'all, whichever arguments are selected.\n  use mode="row", which runs the branch on all samples'
    ) from reason


def _run(
    branch: nn.Module, value: Any, arguments: Collection[int], rows: Tensor, tensor: TensorKey
) -> tuple[list[Tensor], list[Tensor | int]]:
    """Return the results of a call, and the other tensors of the output; for an argument its index."""
    copies: dict[int, Tensor] = {}  # the branch may change its arguments in place

    def copied(leaf: Any) -> Any:
        return copies.setdefault(id(leaf), leaf.detach().clone()) if isinstance(leaf, Tensor) else leaf

    value = map_leaves(value, copied)
    index = {id(leaf): i for i, leaf in enumerate(tensors(value))}
    (args, kwargs), originals = with_rows(value, arguments, rows)
    cache = torch.is_autocast_cache_enabled()
    try:
        # A cast of a weight without gradients must not serve a later forward.
        torch.set_autocast_cache_enabled(False)
        with restored_after(branch, trains=False), torch.no_grad():
            set_eval(branch)
            output = branch.forward(*args, **kwargs)
    finally:
        torch.set_autocast_cache_enabled(cache)
    results: list[Tensor] = []

    def note(y: Tensor) -> Tensor:
        results.append(y)
        return y

    map_tensor(output, tensor, note)
    others = [leaf for leaf in tensors(output) if not any(leaf is y for y in results)]
    return results, [index.get(id(originals.get(id(leaf), (leaf, leaf))[1]), leaf) for leaf in others]


def _equal(x: Tensor | int, y: Tensor | int) -> bool:
    """Whether two tensors are equal up to rounding, or the same argument."""
    if isinstance(x, int) or isinstance(y, int):
        return type(x) is type(y) and bool(x == y)
    if x.shape != y.shape:
        return False
    eps = torch.finfo(x.dtype).eps if x.is_floating_point() else 0.0
    a, b = (torch.nan_to_num(z.to("cpu", torch.float64), posinf=0.0, neginf=0.0) for z in (x, y))
    return bool((a - b).norm() <= max(1e-2, eps**0.5) * a.norm())

"""Where the rows of each sample are in a tensor, for models that fold time, clips or windows into the batch."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hookdrop.core.errors import ShapeError
from hookdrop.core.regularizer import SamplePlace
from hookdrop.core.tensor_tree import map_leaves


@dataclass(frozen=True)
class SampleRows:
    """Where the rows of each sample are in a tensor."""

    axis: int = 0
    interleaved: bool = False
    """Whether sample i of N has the rows i, i + N, ..., as in (T N), and not consecutive ones, as in (N T)."""
    count: int | None = None  #: The number N of samples; None if each row is a sample.

    def samples(self, x: Tensor) -> int:
        """The number of samples in `x`, into which the rows must divide."""
        if not -x.dim() <= self.axis < x.dim():
            raise ShapeError(f"got {tuple(x.shape)}, which has no axis {self.axis}, that of the samples.")
        size = x.shape[self.axis]
        if self.count is None:
            return size
        if self.count == 0 or size % self.count:
            raise ShapeError(
                f"got {tuple(x.shape)}: the {size} rows of axis {self.axis} do not divide into {self.count} samples.\n"
                '  use a regularizer that draws once for the batch, such as DropPath(p=..., mode="batch")'
            )
        return self.count

    def repeat(self, values: Tensor, x: Tensor) -> Tensor:
        """Repeat values (N, *features) for the rows of each sample: (..., rows, ..., *features), 1 along other axes."""
        times, features = x.shape[self.axis] // max(len(values), 1), values.shape[1:]
        by_row = values.repeat(times, *[1] * len(features)) if self.interleaved else values.repeat_interleave(times, 0)
        shape = [1] * (x.dim() - len(features))
        shape[self.axis % x.dim()] = -1
        return by_row.view(*shape, *features)


EACH_ROW = SampleRows()


def sample_place(value: object, owner: str) -> SamplePlace | None:
    """Return the argument `samples` of a regularizer, or raise a `TypeError`."""
    match value:
        case None:
            return None
        case (str() | None as module, int() as axis, bool() as interleaved) if axis is not True and axis is not False:
            return module, axis, interleaved
    raise TypeError(f"{owner}: samples must be None or (module, axis, interleaved), got {value!r}.")


CHOOSE_PLACE = "if you know the axis: samples=(None, axis, False)"


def place_text(place: SamplePlace, shape: Sequence[int]) -> str:
    """Describe where the samples are in a tensor of this shape."""
    module, axis, _ = place
    return (
        f"N={shape[axis]} on axis {axis}" if module is None else f"{shape[axis]} rows on axis {axis}, N from {module!r}"
    )


def rows_in_call(place: SamplePlace | None, collected: SampleRows | None) -> SampleRows:
    """Return where the samples are in a call, given what the hook collected."""
    if place is None:
        return EACH_ROW
    if place[0] is not None and (collected is None or collected.count is None):
        raise ShapeError(
            f"the number of samples is that of the first input of {place[0]!r}, which is not running.\n"
            "  call the model, not a part of it; or remove samples=, if each row is a sample"
        )
    return SampleRows(*place[1:]) if collected is None else collected


def with_rows(value: Any, which: Collection[int], rows: Tensor) -> tuple[Any, dict[int, tuple[Tensor, Tensor]]]:
    """Return `value` with these rows of some of its tensors, given by their order, and (new, old) by the id of the new.

    A tensor that occurs several times does so in the result too.
    """
    number, chosen = itertools.count(), dict[int, tuple[Tensor, Tensor]]()

    def change(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and next(number) in which:
            return chosen.setdefault(id(leaf), (leaf[rows.to(leaf.device)], leaf))[0]
        return leaf

    value = map_leaves(value, change)
    return value, {id(pair[0]): pair for pair in chosen.values()}

"""One random number for each sample, where a tensor has several rows for each: windows, frames, time steps."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from hookdrop.errors import ShapeError


class SampleRows(NamedTuple):
    """Where the samples of a batch are in a tensor. `inject` finds this if it has an example.

    Regularizers store it as a plain tuple, so that their text form is a literal.
    """

    module: str | None
    """The module whose first input has one row for each sample; None if the tensor has one row for each too."""
    axis: int = 0
    interleaved: bool = False
    """Whether sample i of N has the rows i, i + N, ..., and not consecutive ones."""


def sample_rows(value: object, owner: str) -> tuple[str | None, int, bool] | None:
    """Return the argument `samples` of a regularizer, or raise a `TypeError`."""
    if value is None:
        return None
    if isinstance(value, tuple | list) and 1 <= len(value) <= 3:
        rows = SampleRows(*value)
        if isinstance(rows.module, str | None) and type(rows.axis) is int and isinstance(rows.interleaved, bool):
            return tuple(rows)  # type: ignore[return-value]
    raise TypeError(f"{owner}: samples must be None or (module, axis, interleaved), got {value!r}.")


def sample_count(x: Tensor, rows: SampleRows, samples: int | None) -> int:
    """Return the number of samples in `x`, given that of the call."""
    size = x.shape[rows.axis]
    if rows.module is None:
        return size
    if samples is None or samples == 0 or size % samples:
        raise ShapeError(
            f"got {tuple(x.shape)}: the {size} rows of axis {rows.axis} do not divide into {samples} samples.\n"
            '  use a regularizer that draws once for the batch, such as DropPath(p=..., mode="batch")'
        )
    return samples


def for_rows(values: Tensor, x: Tensor, rows: SampleRows) -> Tensor:
    """Repeat values (N, ...) for the rows of each sample: (rows, ...)."""
    count, size = len(values), x.shape[rows.axis]
    repeats = size // max(count, 1)
    if repeats == 1:
        return values
    by_row = values.unsqueeze(0 if rows.interleaved else 1)
    order = (repeats, count) if rows.interleaved else (count, repeats)
    return by_row.expand(*order, *values.shape[1:]).reshape(size, *values.shape[1:])

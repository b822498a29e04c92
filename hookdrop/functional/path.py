"""Stochastic depth."""

from __future__ import annotations

from torch import Tensor

from hookdrop.errors import ShapeError
from hookdrop.functional.rates import checked_rate
from hookdrop.functional.slices import slice_dropout
from hookdrop.utils.validation import floating, one_of


def drop_path(x: Tensor, p: float | Tensor, mode: str = "row", training: bool = True) -> Tensor:
    """Zero whole samples (`mode="row"`) or the whole batch (`"batch"`), scale the rest by 1 / (1 - p).

    Args:
        x: (N, ...), the output of a residual branch.
        p: in [0, 1].
        mode: `"row"` draws for each sample, `"batch"` once.
        training: False returns `x` itself.

    Reference: Huang et al. 2016, "Deep networks with stochastic depth", arXiv:1603.09382.
    """
    floating(x, "drop_path")
    p = checked_rate(p, owner="drop_path")
    one_of(mode, "mode", "drop_path", ("row", "batch"))
    if x.dim() == 0:
        raise ShapeError("got a 0-d tensor: drop_path needs samples along axis 0.")
    rows = x.shape[0] if mode == "row" else 1
    return slice_dropout(x, p, (rows,) + (1,) * (x.dim() - 1), training)

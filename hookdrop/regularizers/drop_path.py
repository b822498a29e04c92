"""DropPath (stochastic depth)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hookdrop.kernels.slices import slice_dropout
from hookdrop.regularizers.base import Regularizer, check_batch_axis
from hookdrop.utils.validation import drop_rate, floating, one_of, rate_or_tensor

_MODES = ("row", "batch")


def drop_path(x: Tensor, p: float | Tensor, mode: str = "row", training: bool = True) -> Tensor:
    """Zero whole samples (`mode="row"`) or the whole batch (`"batch"`), and scale the rest: see `DropPath`."""
    one_of(mode, "mode", "drop_path", _MODES)
    return _drop_path(x, rate_or_tensor(p, owner="drop_path"), mode, training)


def _drop_path(x: Tensor, p: float | Tensor, mode: str, training: bool = True) -> Tensor:
    floating(x, "drop_path")
    check_batch_axis(x.shape)
    rows = x.shape[0] if mode == "row" else 1
    return slice_dropout(x, p, (rows,) + (1,) * (x.dim() - 1)) if training else x


class DropPath(Regularizer):
    """Zero whole samples with probability `p`, and scale the rest by 1 / (1 - p).

    Hook the last layer of a residual branch, before the addition (a Bottleneck's `bn3`, a transformer's `attn` and
    `mlp`). At the output of a whole block it would also drop the skip connection.

    Args:
        p: probability of dropping a sample, in [0, 1].
        mode: `"row"` draws once for each sample, `"batch"` once for the whole batch.
        keep_prob: 1 - p, instead of `p`.

    Shape: (N, ...).

    Reference: Huang et al. 2016, "Deep networks with stochastic depth", arXiv:1603.09382.
    """

    def __init__(self, p: float | None = None, mode: str = "row", *, keep_prob: float | None = None) -> None:
        super().__init__()
        self.p = drop_rate(p, keep_prob, self.title)
        self.mode: str = one_of(mode, "mode", self.title, _MODES)

    def check(self, shape: Sequence[int]) -> None:
        check_batch_axis(shape)

    def reading(self, shape: Sequence[int]) -> str:
        return f"N={shape[0]}"

    @property
    def independent_samples(self) -> bool:
        return self.mode == "row"

    def regularize_at(self, x: Tensor, rate: Any) -> Tensor:
        return _drop_path(x, rate, self.mode)

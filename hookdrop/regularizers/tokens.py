"""Dropout of tokens, and of features over all of a sequence."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hookdrop import functional
from hookdrop.functional.tokens import check_tokens, time_axis
from hookdrop.regularizers.base import Regularizer
from hookdrop.utils.validation import count, drop_rate


class TokenDropout(Regularizer):
    """Zero whole tokens with probability `p`, scale the rest by 1 / (1 - p); the first ones are spared both.

    Tokens are zeroed, where the paper takes them out of the sequence: shapes stay, time is not saved, and attention
    sees a token that is 0. It belongs where the tokens begin (after the position embedding).

    Args:
        p: probability to drop, in [0, 1].
        prefix: how many tokens at the start (class token, registers) are left as they are.
        keep_prob: 1 - p, instead of `p`.

    Shape: (N, L, C) with L above `prefix`. (L - prefix) / L * p of the elements are zero in expectation.

    Raises:
        ShapeError: in forward, if the input is not (N, L, C), or all tokens would be spared.

    Example:
        >>> _ = torch.manual_seed(4)
        >>> TokenDropout(p=0.5)(torch.ones(1, 5, 2))[0, :, 0]
        tensor([1., 2., 0., 2., 0.])

    Reference: Liu et al. 2022, "PatchDropout: Economizing vision transformers using patch dropout",
    arXiv:2208.07220.
    """

    def __init__(self, p: float | None = None, prefix: int = 1, *, keep_prob: float | None = None) -> None:
        super().__init__()
        self.p = drop_rate(p, keep_prob, self.title)
        self.prefix = count(prefix, "prefix", self.title, 0)

    def check(self, shape: Sequence[int]) -> None:
        check_tokens(shape, self.prefix, self.title)

    def reading(self, shape: Sequence[int]) -> str:
        return f"L={shape[1]} ({self.prefix} spared) C={shape[2]}"

    def regularize_at(self, x: Tensor, rate: float | Tensor) -> Tensor:
        return functional.token_dropout(x, rate, self.prefix)


class LockedDropout(Regularizer):
    """Zero elements with probability `p`, the same ones at all steps of time, scale the rest by 1 / (1 - p).

    Args:
        p: probability to drop, in [0, 1].
        time_dim: the axis of time: 1 for (N, T, C), 0 for (T, N, C), which `nn.LSTM` gives without `batch_first`.
        keep_prob: 1 - p, instead of `p`.

    Shape: (N, T, C), or any of three axes or more. The masks of a layer's input and output are one per sequence, as
    in the papers; what passes from step to step within an `nn.LSTM` is out of a hook's reach.

    Raises:
        ShapeError: in forward, if there are fewer than three axes, or no such axis.

    Example:
        >>> _ = torch.manual_seed(4)
        >>> LockedDropout(p=0.5)(torch.ones(1, 3, 4))
        tensor([[[2., 0., 2., 0.],
                 [2., 0., 2., 0.],
                 [2., 0., 2., 0.]]])

    Reference: Gal & Ghahramani 2016, "A theoretically grounded application of dropout in recurrent neural networks",
    arXiv:1512.05287; Merity et al. 2017, "Regularizing and optimizing LSTM language models", arXiv:1708.02182.
    """

    def __init__(self, p: float | None = None, time_dim: int = 1, *, keep_prob: float | None = None) -> None:
        super().__init__()
        self.p = drop_rate(p, keep_prob, self.title)
        self.time_dim = count(time_dim, "time_dim", self.title, -8)

    def check(self, shape: Sequence[int]) -> None:
        time_axis(shape, self.time_dim, self.title)

    def reading(self, shape: Sequence[int]) -> str:
        return f"T={shape[time_axis(shape, self.time_dim, self.title)]}"

    def doubts(self, shape: Sequence[int]) -> list[str]:
        if time_axis(shape, self.time_dim, self.title) == len(shape) - 1:
            return [
                f"reads the last axis of {tuple(shape)} as time, and so drops whole steps; features are the last axis."
            ]
        if len(shape) == 4:
            return [
                f"reads {tuple(shape)} as {self.reading(shape)}; if that is a map, use Dropout2d: it drops channels."
            ]
        return []

    def regularize_at(self, x: Tensor, rate: float | Tensor) -> Tensor:
        return functional.locked_dropout(x, rate, self.time_dim)

"""DropKey: dropping keys of attention before the softmax."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from hookdrop.core import torch_internals as internals
from hookdrop.core.errors import InjectionError, LayerError
from hookdrop.core.regularizer import BELOW_1, DropRegularizer, Rate, Regularizer
from hookdrop.core.tables import some
from hookdrop.kernels import custom_ops, drawing

_MASKED = 100.0
"""A score that is lower than the largest of its row by this has the weight 0 in float32: it is masked."""


def drop_key(scores: Tensor, p: float | Tensor, training: bool = True) -> Tensor:
    """Set scores of attention (..., L, S) to -inf with probability `p`, in [0, 1): see `DropKey`."""
    p = BELOW_1.argument(p, scores, "drop_key", DropKey.axes)
    if not training or scores.numel() == 0 or (not isinstance(p, Tensor) and p == 0.0):
        return scores
    if type(scores) not in internals.PLAIN_TYPES and internals.wraps_results(scores):
        return internals.on_plain_tensor(_drop_key, scores, p)
    return _drop_key(scores, p)


def _drop_key(scores: Tensor, p: float | Tensor) -> Tensor:
    dropped = _draw(scores, p)
    left = torch.where(dropped, -math.inf, scores)
    # Masked keys may have a finite score, such as the lowest number or -10,000. If only they are left, or if there are
    # no others, the row stays as it is: a causal model must not look at later tokens.
    most = _without_repeats(scores.detach()).amax(-1, keepdim=True)
    lowest = torch.finfo(scores.dtype).min / 2
    spared = left.detach().amax(-1, keepdim=True) <= (most - _MASKED).clamp(min=lowest)
    if not _has_values(scores):
        return torch.where(dropped & ~spared, -math.inf, scores)
    if spared.any():  # a few rows
        rows = spared.squeeze(-1)
        left[rows] = scores[rows]
    return left


def _without_repeats(x: Tensor) -> Tensor:
    """Return an expanded tensor, such as a mask for all samples, without its repetitions."""
    return x[tuple([slice(0, 1) if stride == 0 else slice(None) for stride in x.stride()])] if _has_values(x) else x


def _has_values(x: Tensor) -> bool:
    """Whether a value can be read without waiting for an accelerator, or for other members of a transform."""
    return not is_compiling() and internals.functorch_stack() is None and not drawing.must_avoid_sync(x)


def _draw(x: Tensor, p: float | Tensor) -> Tensor:
    if isinstance(p, Tensor):
        return custom_ops.draw_elements(x, p)
    if type(x) in internals.PLAIN_TYPES and internals.functorch_stack() is None:
        return drawing.draw_elements(x, p)[0]
    return torch.rand_like(x, dtype=torch.float32) < p


class DropKey(DropRegularizer):
    """Drop keys of attention with probability `p`: set their scores to -inf before the softmax.

    Each sample, head and query has its own draw. The softmax renormalizes, so that the weights of the other keys sum to
    1, and nothing is scaled. A query whose keys would all be dropped keeps them all. Masked keys stay masked.

    Hook the innermost module that computes attention (`attn`, `self_attn`, ...): a softmax, or a
    `scaled_dot_product_attention`, that weighs positions. Other kernels hide the scores.

    Args:
        p: probability of dropping a key, in [0, 1).
        calls: which calls of softmax, `scaled_dot_product_attention` and `multi_head_attention_forward` in one call of
            the module have the scores, in the order of execution. `inject` finds this with `example_input=`.
        keep_prob: 1 - p, instead of `p`.

    Shape: scores (..., L, S) of L queries and S keys.

    Raises:
        InjectionError: in `inject`, without an example and `calls`; in forward, if the module makes another number of
            calls, or computes the scores inside an activation checkpoint.
        LayerError: in `inject` with an example, if the module computes no attention itself.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> DropKey(p=0.5)(torch.zeros(2, 4)).softmax(-1)
        tensor([[0.0000, 0.3333, 0.3333, 0.3333],
                [1.0000, 0.0000, 0.0000, 0.0000]])

    Reference: Li et al. 2022, "DropKey for vision transformer", arXiv:2208.02646.
    """

    rate: ClassVar[Rate] = BELOW_1
    axes = "... L S"
    only_at = "scores"
    independent_samples = True
    regularize = staticmethod(drop_key)

    def __init__(
        self, p: float | None = None, *, calls: Sequence[bool] | None = None, keep_prob: float | None = None
    ) -> None:
        super().__init__(p, keep_prob=keep_prob)
        if calls is not None and not (isinstance(calls, list | tuple) and all(isinstance(one, bool) for one in calls)):
            raise TypeError(f"DropKey: calls must be None or a tuple of bools, got {calls!r}.")
        self.calls = None if calls is None else tuple(calls)

    def for_layer(self, model: nn.Module, name: str, at: str = "scores", survey: Any = None) -> Regularizer:
        if self.calls is not None:
            return self
        if survey is None:
            raise InjectionError(
                f"DropKey at {name!r} needs an example, to see which softmax of the layer belongs to attention.\n"
                "  pass one: inject(model, DropKey(p=...), layers=..., example_input=x)"
            )
        found = survey.scores.get(name, "it computes no attention that a hook can see")
        if isinstance(found, str) and name in survey.layers:
            others = [one for one, scores in survey.scores.items() if not isinstance(scores, str)]
            more = f"\n  layers that do: {some(others)}" if others else ""
            raise LayerError(f"DropKey at {name!r}: {found}.{more}")
        twin = copy.deepcopy(self)
        twin.calls = () if isinstance(found, str) else found.calls  # the plan reports layers that are never called
        return twin

    def reading(self, shape: Sequence[int]) -> str:
        return f"L={shape[-2]} S={shape[-1]}"

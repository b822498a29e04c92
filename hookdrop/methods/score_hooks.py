"""The hook that regularizes the scores of attention that a module computes.

Scores are no input or output of a module, so a mode sees all functions of PyTorch that the module calls, until a hook
at the end of the call removes it. The mode counts the calls of softmax and of attention, and regularizes what those get
that the regularizer names in `calls`. A call of `scaled_dot_product_attention` hides the scores, but adds a mask to
them, which is regularized instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode

from hookdrop.core.compiling import GraphBreak
from hookdrop.core.errors import InjectionError, ShapeError
from hookdrop.core.hook import SiteHook
from hookdrop.core.regularizer import Regularizer
from hookdrop.core.tensor_tree import TensorKey
from hookdrop.core.torch_internals import opened, remove_function_mode
from hookdrop.methods.around import Around
from hookdrop.methods.calls import has_ended
from hookdrop.training.checkpointing import running_checkpoint

_ATTENTION = F.scaled_dot_product_attention
_HIDING = F.multi_head_attention_forward
_SHOWING = opened(_HIDING)
_broadcast: Any = torch.broadcast_shapes
_COUNTED = (torch.softmax, Tensor.softmax, F.softmax, torch.special.softmax, _ATTENTION, _HIDING)


class ScoreHook(Around):
    """A forward pre-hook that regularizes scores of attention until the call of the module ends."""

    nested = "so the scores of the inner call would be regularized twice.\n  hook a layer inside it."

    @staticmethod
    def check_site(regularizer: Regularizer, module: nn.Module, tensor: TensorKey, name: str) -> str:
        if tensor is not None:
            where = f"{regularizer.title} at {name!r} (scores)"
            raise InjectionError(f"{where} acts on all scores of attention: remove tensor={tensor!r}.")
        return ""

    def place(self, module: nn.Module, **order: bool) -> None:
        super().place(module, ends_first=True)

    def edit(self, module: nn.Module, value: Any, fn: Callable[..., Tensor]) -> Any:
        """Apply `fn` to all scores of this call, later."""
        mode: Any = self.calls.value
        if mode is None:
            mode = ScoreMode(self.where, getattr(self.regularizer, "calls", None) or (), self.calls.frames[-1])
            self.calls.replace(mode)
            mode.__enter__()
        mode.functions.append(lambda scores: SiteHook.edit(self, module, scores, fn))

    def map(self, module: nn.Module, value: Any, fn: Callable[..., Tensor]) -> Any:
        return fn(value)

    def end(self, module: nn.Module, mode: ScoreMode, output: Any) -> None:
        mode.stop()
        if mode.count < len(mode.calls) and output is not None:
            raise InjectionError(mode.miscounted())


class ScoreMode(TorchFunctionMode):
    """Applies functions to the scores of attention."""

    def __init__(self, where: str, calls: Sequence[bool], frame: FrameType | None) -> None:
        super().__init__()
        self.where, self.calls, self.count = where, calls, 0
        self.functions: list[Callable[[Tensor], Tensor]] = []
        self.frame = frame  # what runs the module, in eager code
        self.checkpoint = None if frame is None else running_checkpoint()

    def stop(self: Any) -> None:
        if self.frame is None:
            self.__exit__(None, None, None)
        else:
            self.frame = None
            self.functions.clear()
            remove_function_mode(self)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function not in _COUNTED:
            return function(*args, **kwargs)
        if self.frame is not None:
            return _EAGER.call(self, function, args, kwargs)
        if not is_compiling():
            raise InjectionError(
                f"{self.where}: the compiled code of the layer breaks the graph before it computes the scores.\n"
                "  compile with fullgraph=True to see where, or leave the layer uncompiled: torch.compiler.disable"
            )
        return self._call(function, args, kwargs)

    def _call_in_eager(self, function: Any, args: Any, kwargs: Any) -> Any:
        return function(*args, **kwargs) if has_ended(self.frame) else self._call(function, args, kwargs)

    def _call(self, function: Any, args: Any, kwargs: Any) -> Any:
        self.count += 1
        if self.count > len(self.calls):
            raise InjectionError(self.miscounted())
        if not self.calls[self.count - 1]:
            return function(*args, **kwargs)
        if self.frame is not None and self.checkpoint != running_checkpoint():
            raise InjectionError(
                f"{self.where}: a checkpoint inside the layer, or another autograd function, computes scores, and may "
                "recompute them without the regularizer.\n  checkpoint the whole layer, or hook a layer inside it."
            )
        if function is _HIDING:  # counts as the one call inside it
            self.count -= 1
            with self:
                return _SHOWING(*args, **kwargs)
        return (self._attend if function is _ATTENTION else partial(self._normalize, function))(*args, **kwargs)

    def miscounted(self) -> str:
        """Say that a call of the layer is unlike the one that the regularizer knows."""
        times = f"{'at least ' * (self.count > len(self.calls))}{self.count}"
        return (
            f"{self.where}: the layer called softmax or attention {times} times, and calls={self.calls} has "
            f"{len(self.calls)}, so it is unknown which of them have scores.\n"
            "  inject with an example that runs the layer in the same way: example_input=x\n"
            '  flash and flex kernels hide scores: build the model with attn_implementation="sdpa" (transformers), or '
            "call F.scaled_dot_product_attention"
        )

    def _normalize(self, function: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        return function(self._regularized(input), *args, **kwargs)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if attn_mask is not None and is_causal:  # PyTorch 2.6 ignores one of them in some kernels
            raise InjectionError(
                f"{self.where}: attention got attn_mask= and is_causal=True, of which PyTorch accepts only one.\n"
                "  pass is_causal=False and a mask that is causal: attn_mask & torch.ones_like(attn_mask).tril()"
            )
        mask = self._regularized(scores := additive_mask(query, key, attn_mask, is_causal, enable_gqa))
        if mask is scores:  # only checked, which must not select another kernel
            return _ATTENTION(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return _ATTENTION(query, key, value, mask, dropout_p, scale=scale, enable_gqa=enable_gqa)

    def _regularized(self, scores: Tensor) -> Tensor:
        for function in self.functions:
            scores = function(scores)
        return scores


_EAGER = GraphBreak(ScoreMode._call_in_eager, "DropKey sees the scores of a layer that runs uncompiled.")


def additive_mask(query: Tensor, key: Tensor, attn_mask: Tensor | None, is_causal: bool, enable_gqa: bool) -> Tensor:
    """Return what `scaled_dot_product_attention` adds to the scores, in their shape (N, ..., L, S)."""
    if query.is_nested:
        raise ShapeError("got a NestedTensor, whose attention takes no mask.\n  pad the samples.")
    batch = query.shape[:-2] if enable_gqa else _broadcast(query.shape[:-2], key.shape[:-2])
    shape = (*batch, query.shape[-2], key.shape[-2])
    if is_causal:
        attn_mask = torch.ones(shape[-2:], dtype=torch.bool, device=query.device).tril()
    zero = query.new_zeros(())
    if attn_mask is None:
        return zero.expand(shape)
    return (torch.where(attn_mask, zero, -math.inf) if attn_mask.dtype == torch.bool else attn_mask).expand(shape)

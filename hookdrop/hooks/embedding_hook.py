"""A hook on a token embedding that knows the attention mask.

The embedding is called with token ids only. Pre-hooks on the modules around it that take `attention_mask` save the mask
of their call, and the hook of the embedding takes the mask that was saved last: that of the innermost module.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.compiler import is_compiling

from hookdrop.errors import InjectionError
from hookdrop.hooks.companion import CompanionHook
from hookdrop.hooks.hook import SiteHook
from hookdrop.hooks.state import InjectionState
from hookdrop.regularizers.base import Regularizer
from hookdrop.utils.tensor_tree import TensorKey, bind_arguments, map_tensor, parameter_names

_MASK = "attention_mask"


class EmbeddingHook(SiteHook):
    """A forward hook on an embedding whose regularizer also receives the attention mask, or None without one."""

    def __init__(
        self, site: str, regularizer: Regularizer, p_scale: float, tensor: TensorKey, state: InjectionState
    ) -> None:
        self.mask: Tensor | None = None
        """The mask saved by a compiled pre-hook."""
        self.masks: dict[int, Tensor | None] = {}
        """The masks saved by eager pre-hooks, by thread."""
        self.mask_hooks: list[AttentionMaskHook] = []
        super().__init__(site, regularizer, p_scale, tensor, state)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"mask": None, "masks": {}}

    def map(self, module: nn.Module, value: Any, fn: Callable[..., Tensor]) -> Any:
        mask = self.mask if is_compiling() else self.masks.get(threading.get_ident())
        return map_tensor(value, self.tensor, lambda x: fn(x, attention_mask=mask))

    def save_mask(self, mask: Tensor | None) -> None:
        """Save the mask for the next call of the embedding."""
        if is_compiling():
            self.mask = mask
        else:
            self.masks[threading.get_ident()] = mask

    def place(self, module: nn.Module) -> None:
        root = None if self.state.live.root is None else self.state.live.root()
        around = [] if root is None else [parent for parent in root.modules() if _passes_mask(parent, module)]
        if not around:
            raise InjectionError(
                f"{self.where}: no module around it takes {_MASK!r}, so the padding is unknown.\n"
                "  without the mask, padding gets noise too: attention_mask=False"
            )
        super().place(module)
        self.mask_hooks = [AttentionMaskHook(self) for _ in around]
        for parent, hook in zip(around, self.mask_hooks, strict=True):
            hook.handle = parent.register_forward_pre_hook(hook, with_kwargs=True)

    def remove(self) -> None:
        super().remove()
        for hook in self.mask_hooks:
            hook.remove()
        self.mask_hooks = []


class AttentionMaskHook(CompanionHook):
    """A forward pre-hook that saves the attention mask of a call for an `EmbeddingHook`."""

    owner: EmbeddingHook

    def __call__(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        self.owner.save_mask(bind_arguments(module, args, kwargs or {}).get(_MASK))


def _passes_mask(parent: nn.Module, embedding: nn.Module) -> bool:
    return _MASK in parameter_names(parent) and any(part is embedding for part in parent.modules())

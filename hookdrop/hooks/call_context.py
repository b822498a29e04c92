"""What a regularizer needs besides its tensor, from the call in progress.

The attention mask and the number of samples are arguments of modules around the layer: a pre-hook there stores the
value, and a hook at the end of the same call, which also runs after an error, removes it.
"""

from __future__ import annotations

import threading
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from hookdrop.utils.errors import InjectionError, ShapeError
from hookdrop.utils.select import layers_by_name, named_layers
from hookdrop.utils.tensor_tree import bind_arguments, container_of, parameter_names, tensors

if TYPE_CHECKING:
    from hookdrop.hooks.placed import PlacedSite
    from hookdrop.regularizers.base import Regularizer

MASK, SAMPLES = "attention_mask", "samples"
_CACHES = ("past_key_values", "past_key_value", "layer_past", "past", "cache", "cache_params")


class CallValue(threading.local):
    """A value of the calls in progress, for each thread."""

    def __init__(self) -> None:
        # Each thread that uses the object calls this. A list, because compiled code cannot set a thread's attributes.
        self.stack: list[Any] = []  # the value of the innermost call comes last

    def __reduce__(self) -> Any:
        return CallValue, ()

    def start(self, value: Any) -> None:
        self.stack.append(value)

    def replace(self, value: Any) -> None:
        """Replace the value of the innermost call, if there is one."""
        if self.stack:
            self.stack[-1] = value

    def end(self) -> Any:
        """Remove and return the value of the call that ends; None if there is none."""
        return self.stack.pop() if self.stack else None

    @property
    def value(self) -> Any:
        """The value of the innermost call; None without a call."""
        return self.stack[-1] if self.stack else None


partial_calls = CallValue()
"""The hooks of the layers in progress that run on some of the samples only."""


def has_ended(frame: FrameType | None) -> bool:
    """Whether a call in eager code has ended, also by an interrupt. If so, its local variables are freed."""
    try:
        if frame is not None:
            frame.clear()
    except RuntimeError:  # it is running
        return False
    return True


def place_around(owner: PlacedSite, module: nn.Module) -> None:
    """Place the companions of a site that collect what its regularizer needs from modules around it."""
    root = None if owner.state.live.root is None else owner.state.live.root()
    if root is None:
        return
    for need in owner.collected:
        place = owner.regularizer.samples
        if need == MASK:
            around = [part for part in root.modules() if MASK in parameter_names(part) and module in part.modules()]
            if not around:
                raise InjectionError(
                    f"{owner.where}: no module around it takes {MASK!r}, so the padding is unknown.\n"
                    "  without the mask, padding is regularized too: NEFTune(attention_mask=False)"
                )
        else:
            around = [] if place is None or place[0] is None else [layers_by_name(root)[place[0]].module]
        for parent in around:
            owner.accompany(parent.register_forward_pre_hook, _start_call, need, with_kwargs=True)
            owner.accompany(parent.register_forward_hook, _end_call, need, always_call=True)


def _start_call(owner: PlacedSite, need: str, module: nn.Module, args: Any, kwargs: Any = None) -> None:
    bound = bind_arguments(module, args, kwargs or {})
    # A tensor, not its size: a number that passes between compiled functions would be a constant.
    value = bound.get(MASK) if need == MASK else next((x for x in tensors(bound) if x.dim() > 0), None)
    owner.collected[need].start(value)


def _end_call(owner: PlacedSite, need: str, *_: Any) -> None:
    owner.collected[need].end()


def refuse_cache(bound: dict[str, Any], hook: PlacedSite) -> None:
    """Raise `InjectionError` if a call fills a KV cache, which would keep the keys of what is dropped."""
    for name in _CACHES:
        if bound.get(name) is not None:
            raise InjectionError(
                f"{hook.where}: the layer fills a KV cache ({name}), which would hold keys of dropped layers or lack "
                f"rows.\n  {_cache_settings(hook)} = False   or pass use_cache=False to the model"
            )


def _cache_settings(hook: PlacedSite) -> str:
    """Return the settings that turn on the cache, those of the configs around a layer."""
    found: dict[int, str] = {}
    root = None if hook.state.live.root is None else hook.state.live.root()
    for layer in [] if root is None else named_layers(root):
        config = getattr(layer.module, "config", None)
        if f"{hook.site}.".startswith(f"{layer.name}." * bool(layer.name)) and getattr(config, "use_cache", False):
            found.setdefault(id(config), ".".join(filter(None, ("model", layer.name, "config.use_cache"))))
    return " = ".join(found.values()) or "model.config.use_cache"


def refuse_layout(regularizer: Regularizer, value: Any, x: Tensor) -> None:
    """Raise `ShapeError` if axis 0 of the tensor is not what the regularizer takes it for."""
    has_axes = regularizer.axes.startswith("N") or bool(vars(regularizer).get("shared"))
    if has_axes and isinstance(container_of(value, x), PackedSequence):
        raise ShapeError(
            "got a PackedSequence, whose rows are time steps of different samples.\n"
            "  hook a layer before pack_padded_sequence or after pad_packed_sequence, or use a regularizer that needs "
            "no samples: Dropout(p=...), ActivationPenalty(slowness=0)."
        )
    if any(placement.is_partial() for placement in getattr(x, "placements", ())) and not regularizer.in_backward:
        raise ShapeError(
            "got a DTensor whose values are the terms of a sum over ranks (Partial), not yet added.\n"
            "  inject after parallelize_module, so that the hook gets the sum."
        )
    if x.is_nested and x.layout is torch.strided:
        raise ShapeError("got a strided NestedTensor, which has no shape.\n  build it with layout=torch.jagged.")

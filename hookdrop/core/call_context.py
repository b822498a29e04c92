"""What a regularizer needs besides its tensor, from the call in progress.

The attention mask and the number of samples are arguments of modules around the layer: a pre-hook there stores the
value, and a hook at the end of the same call, which also runs after an error, removes it.
"""

from __future__ import annotations

import threading
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch import nn

from hookdrop.core.errors import InjectionError
from hookdrop.core.select import layers_by_name
from hookdrop.core.tensor_tree import bind_arguments, parameter_names, tensors

if TYPE_CHECKING:
    from hookdrop.core.placed import PlacedSite

MASK, SAMPLES = "attention_mask", "samples"


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

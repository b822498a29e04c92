"""What a regularizer needs besides its tensor: from the call in progress, and where the samples are in the tensor.

The attention mask and the number of samples are arguments of modules around the layer: a pre-hook there stores the
value, and a hook at the end of the same call, which also runs after an error, removes it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import Tensor, nn

from hookdrop.core.errors import InjectionError, ShapeError
from hookdrop.core.selection import layers_by_name
from hookdrop.core.tensor_tree import bind_arguments, parameter_names, tensors

# --- where the samples are


SamplePlace = tuple[str | None, int, bool]
"""(module, axis, interleaved): the module whose first input has one row of axis 0 for each sample, the axis of the
samples in the regularized tensor, and whether sample i of N has its rows i, i + N, ..., and not consecutive ones. The
module is None if the tensor has one row for each sample too. A plain tuple, so that a text form is a literal."""


@dataclass(frozen=True)
class SampleRows:
    """Where the rows of each sample are in a tensor."""

    axis: int = 0
    interleaved: bool = False
    """Whether sample i of N has the rows i, i + N, ..., as in (T N), and not consecutive ones, as in (N T)."""
    count: int | None = None  #: The number N of samples; None if each row is a sample.

    def samples(self, x: Tensor) -> int:
        """The number of samples in `x`, into which the rows must divide."""
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


def sample_place(value: object, owner: str) -> SamplePlace | None:
    """Return the argument `samples` of a regularizer, or raise a `TypeError`."""
    match value:
        case None:
            return None
        case (str() | None as module, int() as axis, bool() as interleaved):
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
        return SampleRows()
    if place[0] is not None and (collected is None or collected.count is None):
        raise ShapeError(
            f"the number of samples is that of the first input of {place[0]!r}, which is not running.\n"
            "  call the model, not a part of it; or remove samples=, if each row is a sample"
        )
    return SampleRows(*place[1:]) if collected is None else collected


# --- values of the calls in progress


MASK, SAMPLES = "attention_mask", "samples"


class CallValue(threading.local):
    """A value of the calls in progress, for each thread."""

    def __init__(self) -> None:
        # Each thread that uses the object calls this. Lists, because compiled code cannot set a thread's attributes.
        self.stack: list[Any] = []  # the value of the innermost call comes last
        self.frames: list[FrameType | None] = []  # what runs each call, in eager code

    def __reduce__(self) -> Any:
        return CallValue, ()

    def start(self, value: Any, frame: FrameType | None = None) -> None:
        self.stack.append(value)
        self.frames.append(frame)

    def replace(self, value: Any) -> None:
        """Replace the value of the innermost call, if there is one."""
        if self.stack:
            self.stack[-1] = value

    def end(self) -> Any:
        """Remove and return the value of the call that ends; None if there is none."""
        if not self.stack:
            return None
        self.frames.pop()
        return self.stack.pop()

    @property
    def is_left(self) -> bool:
        """Whether the value is of a call that an interrupt, or an error in compiled code, has ended."""
        return bool(self.stack) and has_ended(self.frames[-1])

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


def place_around(owner: Any, module: nn.Module) -> None:
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


def _start_call(owner: Any, need: str, module: nn.Module, args: Any, kwargs: Any = None) -> None:
    bound = bind_arguments(module, args, kwargs or {})
    # A tensor, not its size: a number that passes between compiled functions would be a constant.
    value = bound.get(MASK) if need == MASK else [*(x for x in tensors(bound) if x.dim() > 0), None][0]
    owner.collected[need].start(value)


def _end_call(owner: Any, need: str, *_: Any) -> None:
    owner.collected[need].end()

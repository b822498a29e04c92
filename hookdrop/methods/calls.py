"""Values that last as long as the calls in progress."""

from __future__ import annotations

import threading
from types import FrameType
from typing import Any


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

    def settle(self) -> None:
        """Remove the values of calls that an interrupt has ended: PyTorch then runs no more hooks."""
        while self.is_left:
            self.end()

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

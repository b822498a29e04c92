"""The base of hooks that act around a call: a pre-hook begins, and a companion after the call ends it."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, ClassVar

from torch import nn
from torch.compiler import is_compiling

from hookdrop.core.compiling import GraphBreak
from hookdrop.core.errors import InjectionError
from hookdrop.core.hook import SiteHook
from hookdrop.core.sink import CompanionHook
from hookdrop.core.torch_internals import runs_compiled_code, skip_frames_of, when_compiler_is_imported
from hookdrop.methods.calls import CallValue
from hookdrop.training.checkpointing import running_checkpoint


class Around(SiteHook):
    """A forward pre-hook whose effect lasts until the call of the module ends, also by an error.

    Whatever it begins, it remembers as the value of `calls`, and `end` gets that. PyTorch runs no hooks after a
    KeyboardInterrupt, so the next call or a removal ends calls whose frame has ended.
    """

    nested: ClassVar[str] = ""
    """Why a layer that calls itself is refused, and what to do; empty if it is not."""

    def _start(self) -> None:
        self.calls = CallValue()  # what calls in progress remember; None if the hook changes nothing
        super()._start()

    def place(self, module: nn.Module, *, prepend: bool = False, ends_first: bool = False) -> None:
        super().place(module, prepend=prepend)
        self.accompany(module.register_forward_hook, Around.end_call, always_call=True, prepend=ends_first)

    def __call__(self, module: nn.Module, *call: Any) -> Any:
        if is_compiling():
            return self.begin_in_graph(module, *call)
        return _BEGIN.call(self, sys._getframe(1), runs_compiled_code(), module, *call)

    def begin(self, frame: FrameType | None, compiles: bool, module: nn.Module, *call: Any) -> Any:
        """Begin a call that runs in `frame`, in eager code, where the compiler may see functions one by one."""
        self.settle(module, left_only=True)
        outer = self.calls.value
        self.calls.start(None, frame)
        if self.nested and outer is not None:
            raise InjectionError(f"{self.where}: the layer calls itself, {self.nested}")
        return super().__call__(module, *call)

    def begin_in_graph(self, module: nn.Module, *call: Any) -> Any:
        self.calls.start(None)
        return super().__call__(module, *call)

    def end_call(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self.end_in_graph(module, output) if is_compiling() else _END.call(self, module, output)

    def finish(self, module: nn.Module, output: Any) -> Any:
        memory = self.calls.end()
        return None if memory is None else self.end(module, memory, output)

    end_in_graph = finish

    def end(self, module: nn.Module, memory: Any, output: Any) -> Any:
        """End a call that remembers something, and return its changed output, or None. It is None after an error."""

    def settle(self, module: nn.Module, *, left_only: bool = False) -> None:
        # The last to begin is the first to end.
        for hook in reversed([one for one in module._forward_pre_hooks.values() if isinstance(one, Around)]):
            while hook.calls.is_left if left_only else hook.calls.stack:
                hook.finish(module, None)


_REASON = "hookdrop acts around a layer that runs uncompiled."
_BEGIN = GraphBreak(lambda hook, *call: hook.begin(*call), _REASON)
_END = GraphBreak(Around.finish, _REASON)
# Inside a graph, these are part of it. Outside, compiling them alone would hide the frame of the call.
when_compiler_is_imported(
    lambda: skip_frames_of(
        *(Around.__call__, Around.end_call, CompanionHook.__call__, runs_compiled_code, running_checkpoint)
    )
)

"""What a regularizer needs from modules around its layer, in the call in progress.

The attention mask and the number of samples are arguments of such modules: a pre-hook there stores the value, and a
hook at the end of the same call, which also runs after an error, removes it.
"""

from __future__ import annotations

import sys
from functools import reduce
from types import FrameType
from typing import Any

from torch import nn
from torch.compiler import is_compiling

from hookdrop.core.compiling import GraphBreak
from hookdrop.core.errors import InjectionError, LayerError
from hookdrop.core.regularizer import Regularizer
from hookdrop.core.selection import layers_by_name
from hookdrop.core.sink import CompanionHook
from hookdrop.core.tensor_tree import bind_arguments, fits, parameter_names, tensors
from hookdrop.core.torch_internals import graph_task, skip_frames_of, when_compiler_is_imported
from hookdrop.methods.calls import CallValue, partial_calls
from hookdrop.regularizers.samples import SampleRows

MASK, SAMPLES = "attention_mask", "samples"


class Collected:
    """The values of one site by need, as the regularizer declares it."""

    def __init__(self, regularizer: Regularizer) -> None:
        self.calls = {need: CallValue() for need in regularizer.needs if need in (MASK, SAMPLES)}
        self.samples = regularizer.samples

    def place(self, hook: Any, module: nn.Module) -> None:
        """Place the companions of a hook that collect the values."""
        root = None if hook.state.live.root is None else hook.state.live.root()
        if root is None:
            return
        for need in self.calls:
            if need == MASK:
                around = [part for part in root.modules() if MASK in parameter_names(part) and module in part.modules()]
                if not around:
                    raise InjectionError(
                        f"{hook.where}: no module around it takes {MASK!r}, so the padding is unknown.\n"
                        "  without the mask, padding is regularized too: NEFTune(attention_mask=False)"
                    )
            else:
                name = None if self.samples is None else self.samples[0]
                known = layers_by_name(root)
                if name is not None and name not in known:
                    raise LayerError(f"{hook.where}: samples={self.samples}, but the model has no module {name!r}.")
                around = [] if name is None else [known[name].module]
            for parent in around:
                hook.accompany(parent.register_forward_pre_hook, _start_call, need, with_kwargs=True)
                hook.accompany(parent.register_forward_hook, _end_call, need, always_call=True)

    def values(self, hook: Any) -> dict[str, Any]:
        """Return what `regularize` gets in the innermost call."""
        if not is_compiling():
            self._settle(hook)
        found = {need: _of_kept_samples(one.value) for need, one in self.calls.items()}
        if SAMPLES in found:
            batch, place = found[SAMPLES], self.samples
            found[SAMPLES] = place and SampleRows(*place[1:], None if batch is None else batch.shape[0])
        return found

    def _settle(self, hook: Any) -> None:
        for call in self.calls.values():
            call.settle()
        if MASK in self.calls and not self.calls[MASK].stack and graph_task() == -1:
            hook.state.warn_once(
                "no mask",
                f"{hook.where}: the module that gets {MASK!r} is not running, so padding is regularized too.\n"
                "  call the model, not a part of it; if the layer was moved or copied to another model, inject there",
            )

    def missing(self, known: dict[str, Any]) -> dict[str, Any]:
        """Return the values of an earlier call that this one lacks."""
        return {need: value for need, value in known.items() if self.calls[need].value is None}


def _start_call(hook: Any, need: str, module: nn.Module, args: Any, kwargs: Any = None) -> None:
    if is_compiling():
        _start(hook, need, None, module, args, kwargs)
    else:  # the frame is that of PyTorch's code, which calls the companion
        _START.call(hook, need, sys._getframe(2), module, args, kwargs)


def _start(hook: Any, need: str, frame: FrameType | None, module: nn.Module, args: Any, kwargs: Any) -> None:
    bound = bind_arguments(module, args, kwargs or {})
    if need == MASK:
        value = bound.get(MASK)
    else:
        # A tensor, not its size: a number that passes between compiled functions would be a constant. (The compiler of
        # PyTorch 2.6 cannot trace `next` with a default.)
        with_rows = [x for x in tensors(bound) if x.dim() > 0]
        value = [*filter(fits, with_rows), *with_rows, None][0]
    calls = hook.collected.calls[need]
    if frame is not None:
        calls.settle()
    calls.start((value, len(partial_calls.stack)), frame)


def _of_kept_samples(collected: tuple[Any, int] | None) -> Any:
    """Return the rows of a value that layers in between, which run on some of the samples, have kept."""
    value, around = collected or (None, 0)
    between = [] if value is None else partial_calls.stack[around:]
    return reduce(lambda rows, hook: rows[hook.calls.value.runs_on.to(rows.device)], between, value)


def _end_call(hook: Any, need: str, *_: Any) -> None:
    hook.collected.calls[need].end()


_START = GraphBreak(_start, "hookdrop collects an argument of a module that runs uncompiled.")
# Inside a graph, these are part of it. Outside, compiling them alone would take one compilation for each kind of call.
when_compiler_is_imported(lambda: skip_frames_of(CompanionHook.__call__, _start_call, _end_call))

"""What a regularizer needs from modules around its layer, in the call in progress.

The attention mask and the number of samples are arguments of such modules: a pre-hook there stores the value, and a
hook at the end of the same call, which also runs after an error, removes it.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from hookdrop.core.errors import InjectionError
from hookdrop.core.regularizer import Regularizer
from hookdrop.core.selection import layers_by_name
from hookdrop.core.tensor_tree import bind_arguments, parameter_names, tensors
from hookdrop.methods.calls import CallValue
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
                around = [] if name is None else [layers_by_name(root)[name].module]
            for parent in around:
                hook.accompany(parent.register_forward_pre_hook, _start_call, need, with_kwargs=True)
                hook.accompany(parent.register_forward_hook, _end_call, need, always_call=True)

    def values(self) -> dict[str, Any]:
        """Return what `regularize` gets in the innermost call."""
        found = {need: one.value for need, one in self.calls.items()}
        if SAMPLES in found:
            batch, place = found[SAMPLES], self.samples
            found[SAMPLES] = place and SampleRows(*place[1:], None if batch is None else batch.shape[0])
        return found

    def missing(self, known: dict[str, Any]) -> dict[str, Any]:
        """Return the values of an earlier call that this one lacks."""
        return {need: value for need, value in known.items() if self.calls[need].value is None}


def _start_call(hook: Any, need: str, module: nn.Module, args: Any, kwargs: Any = None) -> None:
    bound = bind_arguments(module, args, kwargs or {})
    # A tensor, not its size: a number that passes between compiled functions would be a constant. (The compiler of
    # PyTorch 2.6 cannot trace `next` with a default.)
    value = bound.get(MASK) if need == MASK else [*(x for x in tensors(bound) if x.dim() > 0), None][0]
    hook.collected.calls[need].start(value)


def _end_call(hook: Any, need: str, *_: Any) -> None:
    hook.collected.calls[need].end()

"""Activation checkpointing: a recomputed forward must use the same masks as the original forward.

PyTorch restores the RNG state of the original forward, which gives the same mask if the rate is also the same. A
recomputed call is therefore matched to its original by the RNG state.
"""

from __future__ import annotations

import ctypes
import inspect
import math
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hookdrop.core import torch_internals as internals
from hookdrop.core.hook import SiteHook
from hookdrop.core.regularizer import CurrentRate
from hookdrop.core.tensor_tree import tensors

Call = tuple[str, bool, int]  # site, training mode, and a fingerprint of the RNG state
MAX_CALLS_PER_STATE = 64  # how many calls of one site with equal RNG states are distinguished
CAPACITY = 2**14  # how many calls are remembered: about 100 sites in 100 forward passes
CAPACITY_WITH_TENSORS = 64  # how many calls of each site, once they hold tensors, such as an attention mask


def is_checkpointed() -> bool:
    """Whether a checkpoint is on the call stack, for versions of PyTorch that cannot report saved-tensors hooks."""
    return _checkpoint_code() in callers()


@cache
def _checkpoint_code() -> CodeType:
    from torch.utils.checkpoint import checkpoint

    code: CodeType = inspect.unwrap(checkpoint).__code__
    return code


def callers() -> Iterator[CodeType]:
    """Yield the code of each frame on the stack, from the innermost."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


def running_checkpoint() -> tuple[bool, Any]:
    """Return what changes where the forward of a checkpoint begins: whether it is a reentrant one, or its hooks."""
    is_reentrant = not torch.is_grad_enabled() and is_inside_autograd_function()
    if internals.saved_tensors_hooks is None:
        return is_reentrant, [*callers()].count(_checkpoint_code())
    hooks: Any = internals.saved_tensors_hooks(True)
    hooked = hooks and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"
    return is_reentrant, hooks if hooked else None


# --- the calls that a backward pass may recompute


class NotedCall(NamedTuple):
    sequence_number: int  # that of the next autograd node
    with_gradients: bool
    rate: CurrentRate | None  # None if it dropped nothing
    collected: Mapping[str, Any]
    """What was collected from modules around the layer, which a checkpoint of a part of them does not run again."""


class CheckpointedCalls(dict[Call, list[NotedCall]]):
    """The calls that a backward pass may recompute."""

    complete = True  # whether no call was evicted

    @property
    def detects_redraws(self) -> bool:
        """Whether a call without a matching forward must be a recompute from another RNG state."""
        # Before PyTorch 2.8, composable checkpoints are not detected: they are not on the call stack.
        return self.complete and (internals.saved_tensors_hooks is not None or bool(self))

    def note(self, call: Call, rate: CurrentRate | None, collected: Mapping[str, Any], sites: int) -> None:
        """Remember a call of one of these `sites`, and forget the oldest if there are too many."""
        same_state = self.pop(call, [])
        # If nothing is drawn, as inside `disabled`, the next forward starts from the same RNG state.
        noted = NotedCall(internals.sequence_number(), torch.is_grad_enabled(), rate, collected)
        self[call] = [*same_state[1 - MAX_CALLS_PER_STATE :], noted]
        holds_tensors = any(isinstance(value, Tensor) for value in collected.values())
        while len(self) > (min(CAPACITY, CAPACITY_WITH_TENSORS * sites) if holds_tensors else CAPACITY):
            del self[next(iter(self))]
            self.complete = False

    def find(self, call: Call) -> NotedCall | None:
        """Return the forward that this call recomputes, or None if no forward had this RNG state."""
        same_state = self.get(call)
        if same_state is None:
            return None
        if len({(noted.rate, *map(id, noted.collected.values())) for noted in same_state}) == 1:
            return same_state[-1]
        node = internals.current_node()
        # A reentrant checkpoint recomputes inside its own node, and its forward ran without gradients.
        with_gradients = not node.name().startswith("CheckpointFunction")
        now = internals.node_sequence_number(node)

        def distance(noted: NotedCall) -> tuple[bool, float]:
            # The nodes between a call and its recompute. A reentrant checkpoint creates its node after its forward.
            then = noted.sequence_number
            nodes = now - then if noted.with_gradients else then - now - 1
            return noted.with_gradients != with_gradients, nodes if nodes >= 0 else math.inf

        return min(same_state, key=distance)


def rng_fingerprint(value: Any) -> int:
    """Hash the state of PyTorch's generators, on the CPU and on the accelerator of the first tensor in `value`.

    The current device may be a different one: each autograd thread has its own.
    """
    first = value if isinstance(value, Tensor) else next(iter(tensors(value)), None)
    if internals.dispatch_modes() > 0 or internals.functorch_stack() is not None:
        # Selective checkpoints, fake tensors and `torch.func` must not see these operations.
        with internals.without_dispatch_modes(), internals.without_functorch():
            return hash(_generator_states(first))
    return hash(_generator_states(first))


def _generator_states(x: Tensor | None) -> tuple[bytes, ...]:
    """The state of the generator on the CPU, and of that on the device of `x`."""
    states = [torch.default_generator.get_state()]
    if x is not None and x.device.type not in ("cpu", "meta"):
        module = torch.get_device_module(x.device)
        usable = getattr(module, "is_initialized", lambda: True)()
        if usable and not getattr(module, "is_current_stream_capturing", lambda: False)():
            states.append(module.get_rng_state(*[x.device] * (x.device.type != "mps")))
    # The position and the first words of the Mersenne Twister identify its state as well as all 5,056 bytes.
    return tuple([ctypes.string_at(state.data_ptr(), min(64, state.numel())) for state in states])


# --- what hooks do in a forward that may be recomputed, and in a recompute


def note_forward(hook: SiteHook, module: nn.Module, value: Any, rate: CurrentRate | None) -> None:
    """Remember the call for a recompute, and warn if this forward collects batch-norm statistics."""
    live = hook.state.live
    if live.checkpointed is None:
        live.checkpointed = CheckpointedCalls()
    collected = {} if hook.collected is None else hook.collected.values(hook)
    live.checkpointed.note(
        (hook.site, module.training, _fingerprint(hook, value)), rate, collected, len(live.known_sites)
    )
    drops = module.training and rate is not None and not rate.neutral and not hook.adds_to_loss
    if drops and not torch.is_grad_enabled() and "without gradients" not in hook.state.warned_kinds:
        _warn_without_gradients(hook)


def recompute(hook: SiteHook, module: nn.Module, value: Any, rate: CurrentRate | None) -> Any:
    """Run the hook inside a checkpoint's recompute, at the rate that the original forward used."""
    calls = CheckpointedCalls() if hook.state.live.checkpointed is None else hook.state.live.checkpointed
    if not calls and (rate is None or rate.neutral):
        return None
    before = _fingerprint(hook, value)
    known = calls.find((hook.site, module.training, before))
    rate = rate if known is None else known.rate
    if rate is None or rate.neutral:
        return None

    def apply(x: Tensor, **context: Any) -> Tensor:
        # The checkpoint may not run the modules around the layer again.
        missing = {} if known is None or hook.collected is None else hook.collected.missing(known.collected)
        if known is None and hook.collected is not None and not calls.complete:
            hook.state.warn_once(
                "forgotten call",
                f"{hook.where} runs again in a backward pass, and what it got in the forward, such as its attention "
                f"mask, is forgotten after {CAPACITY_WITH_TENSORS} forwards, so the gradients may be wrong.\n"
                "  call backward() after fewer forwards, or checkpoint a module around the one that gets the mask.",
            )
        try:
            return hook.apply(x, rate, **(context | missing))
        finally:
            # A checkpoint stops the recompute by an exception once all saved tensors are available.
            if known is None and calls.detects_redraws and _fingerprint(hook, value) != before:
                hook.state.warn_once(
                    "different mask",
                    f"{hook.state.name!r}: {hook.site!r} ran in a backward pass with an RNG state that none of its "
                    "forwards had. If an activation checkpoint recomputed it, its mask differs from that of the "
                    "forward, and the gradients are wrong.\n"
                    "  the checkpoint must restore the RNG state: remove preserve_rng_state=False. "
                    "Inject or replace before the forward, not between forward and backward.",
                )

    return hook.edit(module, value, apply)


def _fingerprint(hook: SiteHook, value: Any) -> int:
    return rng_fingerprint(value[2] if hook.at == "output" else value)


def _warn_without_gradients(hook: SiteHook) -> None:
    """Warn about a forward in training mode without gradients, once the model is being trained."""
    state, live = hook.state, hook.state.live
    is_trained = live.update_counter is not None and not live.update_counter.copied and live.update_counter.updates
    if collects_statistics():
        state.warn_once(
            "dropped statistics",
            f"{state.name!r} drops activations while batch-norm statistics are collected, so these are wrong "
            "for eval mode.\n  collect them with hookdrop.update_bn(loader, model), or inside: with "
            "hookdrop.find(model).disabled(): ...",
        )
    elif is_trained and not live.contexts and live.observe is None and not is_inside_autograd_function():
        state.warn_once(
            "without gradients",
            f"{state.name!r} drops in a forward in training mode without gradients (a reference model? a rollout? "
            "an evaluation?).\n  call model.eval() before it, or run it inside: with "
            "hookdrop.find(model).disabled(): ...\n  a method of a trainer: trainer.method = "
            "hookdrop.find(model).disabled()(trainer.method)",
        )


_COLLECTORS = frozenset({"update_bn", "bn_update", "update_bn_stats"})
"""The functions that collect batch-norm statistics: of PyTorch, of the authors of SWA, and of fvcore and mmengine. Many
projects copied one of them, so they are recognized by name."""


def collects_statistics() -> bool:
    """Whether batch-norm statistics are being collected, which hooks that drop make those of dropped activations.

    Nothing else distinguishes these passes from those of a momentum encoder, which also run in training mode without
    gradients.
    """
    return any(code.co_name in _COLLECTORS for code in callers())


def is_inside_autograd_function() -> bool:
    """Whether the forward of an autograd function is running, such as a reentrant checkpoint: gradients are off there.

    Its first argument is the context that saves tensors for the backward pass.
    """
    return any(code.co_varnames[:1] == ("ctx",) for code in callers())

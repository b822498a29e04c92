"""Activation checkpointing: a recomputed forward must use the same masks as the original forward.

PyTorch restores the RNG state of the original forward, which gives the same mask if the rate is also the same. A
recomputed call is therefore matched to its original by the RNG state.
"""

from __future__ import annotations

import ctypes
import inspect
import math
import sys
from functools import cache
from types import CodeType, FrameType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hookdrop.utils.tensor_tree import tensors
from hookdrop.utils.torch_internals import (
    current_node,
    dispatch_modes,
    functorch_stack,
    graph_task,
    node_sequence_number,
    saved_tensors_hooks,
    sequence_number,
    without_dispatch_modes,
    without_functorch,
)

Rate: TypeAlias = Any
"""A `hooks.hook.CurrentRate`, or None if the call dropped nothing. This module only stores it."""

Call = tuple[str, bool, int]
"""Site, training mode, and a fingerprint of the RNG state."""

MAX_CALLS_PER_STATE = 8
"""How many calls of one site with equal RNG states are distinguished."""

CAPACITY = 2**14
"""How many calls are remembered: about 100 sites in 100 forwards."""


def is_recomputing() -> bool:
    """Whether a backward pass is running."""
    return graph_task() != -1


def may_be_recomputed() -> bool:
    """Whether this may be a checkpointed forward: gradients are off, or saved-tensors hooks are active."""
    if torch.is_grad_enabled():
        return _saved_tensors_are_hooked()
    return not torch.is_inference_mode_enabled()


def _saved_tensors_are_hooked() -> bool:
    if saved_tensors_hooks is not None:
        return saved_tensors_hooks(True) is not None
    # PyTorch 2.6 and 2.7 cannot report it, but `checkpoint` is on the call stack.
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not _checkpoint_code():
        frame = frame.f_back
    return frame is not None


@cache
def _checkpoint_code() -> CodeType:
    from torch.utils.checkpoint import checkpoint

    code: CodeType = inspect.unwrap(checkpoint).__code__
    return code


class CheckpointedRates(dict[Call, list[tuple[int, bool, "Rate | None"]]]):
    """The rates of calls that a backward pass may recompute.

    Each call has the next autograd sequence number, whether gradients were enabled, and the rate.
    """

    complete = True
    """Whether no call was evicted."""

    @property
    def detects_redraws(self) -> bool:
        """Whether a call without a matching forward must be a recompute from another RNG state."""
        # Before PyTorch 2.8, composable checkpoints are not detected: they are not on the call stack.
        return self.complete and (saved_tensors_hooks is not None or bool(self))

    def note(self, call: Call, rate: Rate | None) -> None:
        """Remember a call, and evict the oldest if there are more than `CAPACITY`."""
        same_state = self.pop(call, [])
        # If nothing is drawn, as inside `disabled`, the next forward starts from the same RNG state.
        self[call] = [*same_state[1 - MAX_CALLS_PER_STATE :], (sequence_number(), torch.is_grad_enabled(), rate)]
        if len(self) > CAPACITY:
            del self[next(iter(self))]
            self.complete = False

    def find(self, call: Call) -> NotedRate | None:
        """Return the rate of the forward that this call recomputes, or None if no forward had this RNG state."""
        same_state = self.get(call)
        if same_state is None:
            return None
        if len({rate for _, _, rate in same_state}) == 1:
            return NotedRate(same_state[-1][2])
        node = current_node()
        # A reentrant checkpoint recomputes inside its own node, and its forward ran without gradients.
        with_gradients = not node.name().startswith("CheckpointFunction")
        number = node_sequence_number(node)
        nearest = min(same_state, key=lambda noted: (noted[1] != with_gradients, _distance(number, *noted[:2])))
        return NotedRate(nearest[2])


class NotedRate:
    """The rate of a remembered forward; None if it dropped nothing."""

    def __init__(self, rate: Rate | None) -> None:
        self.rate = rate


def _distance(now: int, noted: int, with_gradients: bool) -> float:
    """The nodes between a call and its recompute. A reentrant checkpoint creates its node after its forward."""
    nodes = now - noted if with_gradients else noted - now - 1
    return nodes if nodes >= 0 else math.inf


def rng_fingerprint(value: Any) -> int:
    """Hash the state of PyTorch's generators, on the CPU and on the accelerator of the first tensor in `value`.

    The current device may be a different one: each autograd thread has its own.
    """
    first = value if isinstance(value, Tensor) else next(iter(tensors(value)), None)
    if dispatch_modes() > 0 or functorch_stack() is not None:
        # Selective checkpoints, fake tensors and `torch.func` must not see these operations.
        with without_dispatch_modes(), without_functorch():
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

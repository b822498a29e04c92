"""Activation checkpointing: a forward that is recomputed in a backward pass must drop what the first one dropped.

PyTorch restores the random state of the forward, and so the mask, if the rate is the forward's too. A call is
recognized by the random state that it finds, whatever has happened in between.
"""

from __future__ import annotations

import inspect
import math
import sys
from functools import cache
from types import CodeType, FrameType
from typing import Any, TypeAlias

import torch

from hookdrop.utils.tensor_tree import tensors
from hookdrop.utils.torch_internals import (
    current_node,
    graph_task,
    number_of,
    saved_tensors_hooks,
    sequence_number,
    without_dispatch_modes,
    without_functorch,
)

Rate: TypeAlias = Any
"""What a call did: a `hooks.hook.Rate`, or None for nothing. Here it is only kept and given back."""

Call = tuple[str, bool, int]
"""Site, whether in training mode, and a fingerprint of the random state."""

SAME_STATE = 8
"""Calls of one site from one random state that are told apart."""

CAPACITY = 2**14
"""Calls that are remembered: those of a hundred sites in a hundred forwards."""


def is_recomputing() -> bool:
    """Whether this runs within a backward pass."""
    return graph_task() != -1


def may_be_recomputed() -> bool:
    """Whether this looks like the forward of a checkpoint: without gradients, or with hooks on saved tensors."""
    if torch.is_grad_enabled():
        return _saved_tensors_are_hooked()
    return not torch.is_inference_mode_enabled()


def _saved_tensors_are_hooked() -> bool:
    if saved_tensors_hooks is not None:
        return saved_tensors_hooks(True) is not None
    # PyTorch 2.6 and 2.7 cannot tell, but there the checkpoint's own function is among the callers.
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
    """The rates of calls that a backward pass may repeat; a None among them was a call that dropped nothing.

    A call has the next number of an autograd node, whether gradients were on, and the rate.
    """

    complete = True
    """Whether no call was forgotten."""

    @property
    def is_certain(self) -> bool:
        """Whether a call without a remembered forward repeats one at another random state."""
        # Before PyTorch 2.8 a checkpoint without a function among the callers (a composable one) is not noticed.
        return self.complete and (saved_tensors_hooks is not None or bool(self))

    def note(self, call: Call, rate: Rate | None) -> None:
        """Remember a call; beyond the capacity the oldest is forgotten."""
        same_state = self.pop(call, [])
        # Where nothing is drawn, as inside of `disabled`, the next forward finds the same random state.
        self[call] = [*same_state[1 - SAME_STATE :], (sequence_number(), torch.is_grad_enabled(), rate)]
        if len(self) > CAPACITY:
            del self[next(iter(self))]
            self.complete = False

    def find(self, call: Call) -> Known | None:
        """The rate of the forward that this call repeats; None if no forward had this random state."""
        same_state = self.get(call)
        if same_state is None:
            return None
        if len({rate for _, _, rate in same_state}) == 1:
            return Known(same_state[-1][2])
        node = current_node()
        # A reentrant checkpoint runs inside of its own node, and its forward ran without gradients.
        with_gradients = not node.name().startswith("CheckpointFunction")
        number = number_of(node)
        nearest = min(same_state, key=lambda noted: (noted[1] != with_gradients, _distance(number, *noted[:2])))
        return Known(nearest[2])


class Known:
    """What a forward did, which may have been nothing."""

    def __init__(self, rate: Rate | None) -> None:
        self.rate = rate


def _distance(now: int, noted: int, with_gradients: bool) -> float:
    """Nodes from a noted call to its repetition: a reentrant checkpoint's node is made after its forward."""
    nodes = now - noted if with_gradients else noted - now - 1
    return nodes if nodes >= 0 else math.inf


def random_state(value: Any) -> int:
    """A fingerprint of PyTorch's generators, on the CPU and on the accelerator that the first tensor of `value` is on.

    The current device may be another: each of autograd's threads has one.
    """
    device = next((tensor.device for tensor in tensors(value)), None)
    # Selective checkpoints, fake tensors and `torch.func` must not see these operations.
    with without_dispatch_modes(), without_functorch():
        states = [torch.default_generator.get_state()]
        if device is not None and device.type not in ("cpu", "meta"):
            module = torch.get_device_module(device)
            usable = getattr(module, "is_initialized", lambda: True)()
            if usable and not getattr(module, "is_current_stream_capturing", lambda: False)():
                states.append(module.get_rng_state(*[device] * (device.type != "mps")))
        # The Mersenne Twister's position and its first words tell as much as all of its 5,056 bytes.
        return hash(tuple(tuple(state[:64].tolist()) for state in states))

"""Activation checkpointing: what runs again in a backward pass must drop what its forward dropped.

PyTorch gives the random state of the forward back, and so the mask, if the rate is that of the forward too. A call is
known again by the random state that it finds, whatever has happened in between.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from hookdrop.utils.tensor_tree import tensors

_internals: Any = torch._C
_graph_task: Callable[[], int] = getattr(_internals, "_current_graph_task_id", lambda: -1)
_TELLS = hasattr(_internals._autograd, "_top_saved_tensors_default_hooks")
# Where PyTorch (2.6 and 2.7, say) doesn't tell, every forward counts as one whose tensors others keep.
_saved_tensors_hooks: Callable[[bool], Any] = (
    _internals._autograd._top_saved_tensors_default_hooks if _TELLS else lambda _: True
)

_sequence_nr: Callable[[], int] = _internals._autograd._get_sequence_nr
_current_node: Callable[[], Any] = _internals._current_autograd_node

Rate = tuple[bool, float | None]
"""Whether a hook had something to do, and at what rate (None where there is none)."""

Call = tuple[str, bool, int]
"""Site, whether in training mode, and a fingerprint of the random state."""

ALIKE = 8
"""Calls of one site from one random state that are told apart."""

CAPACITY = 2**14
"""Calls that are remembered: those of a hundred sites in a hundred forwards."""


def running_again() -> bool:
    """Whether this is called from within a backward pass."""
    return _graph_task() != -1


def may_run_again() -> bool:
    """Whether this is the forward of an activation checkpoint: without gradients, or with others keeping tensors."""
    if torch.is_grad_enabled():
        return _saved_tensors_hooks(True) is not None
    return not torch.is_inference_mode_enabled()


class Forwards:
    """The rates of the calls that may be run again."""

    def __init__(self) -> None:
        self.rates: dict[Call, list[tuple[int, bool, Rate]]] = {}
        """How many nodes the graph had then, whether with gradients, and the rate."""
        self.complete = True
        """Whether no call was forgotten."""

    def note(self, call: Call, rate: Rate) -> None:
        """Remember a call, the oldest of too many making room."""
        alike = self.rates.pop(call, [])
        # Where nothing is drawn, as in `disabled`, the next forward finds the same random state.
        self.rates[call] = [*alike[1 - ALIKE :], (_sequence_nr(), torch.is_grad_enabled(), rate)]
        if len(self.rates) > CAPACITY:
            del self.rates[next(iter(self.rates))]
            self.complete = False

    def rate_of(self, call: Call) -> Rate | None:
        """The rate of the forward that this call repeats; None if no forward had this random state."""
        alike = self.rates.get(call)
        if alike is None or len({rate for _, _, rate in alike}) == 1:
            return alike[-1][2] if alike else None
        node, kept = _current_node(), _saved_tensors_hooks(True) is not None
        if not _TELLS:  # a reentrant checkpoint is known by its node
            kept = not node.name().startswith("CheckpointFunction")
        now = node._sequence_nr()
        return min(alike, key=lambda noted: (noted[1] != kept, _distance(now, *noted[:2])))[2]


def _distance(now: int, noted: int, with_gradients: bool) -> float:
    """Nodes from a noted call to the one that runs it again: a reentrant checkpoint's own is made after its forward."""
    nodes = now - noted if with_gradients else noted - now - 1
    return nodes if nodes >= 0 else math.inf


def random_state(value: Any) -> int:
    """A fingerprint of PyTorch's generators, on the CPU and on the accelerator that the first tensor of `value` is on.

    Not of the device in use: in a backward pass that is another one, on each of autograd's threads its own.
    """
    device = next((tensor.device for tensor in tensors(value)), None)
    # Not seen by those who watch operations: selective checkpoints, fake tensors, `torch.func`.
    with _internals._DisableTorchDispatch(), _internals._DisableFuncTorch():
        states = [torch.default_generator.get_state()]
        if device is not None and device.type not in ("cpu", "meta"):
            module = torch.get_device_module(device)
            asked = getattr(module, "is_initialized", lambda: True)()
            if asked and not getattr(module, "is_current_stream_capturing", lambda: False)():
                states.append(module.get_rng_state(*[device] * (device.type != "mps")))
        # The Mersenne Twister's position and its first words tell as much as all of its 5,056 bytes.
        return hash(tuple(tuple(state[:64].tolist()) for state in states))

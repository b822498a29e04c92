"""Activation checkpointing: what runs again in a backward pass must drop what its forward dropped.

PyTorch gives the random state of the forward back, and so the mask, if the rate is that of the forward too. A call is
known again by the random state that it finds, whatever has happened in between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_internals: Any = torch._C
_graph_task: Callable[[], int] = getattr(_internals, "_current_graph_task_id", lambda: -1)
# Where PyTorch (2.6 and 2.7, say) doesn't tell, every forward counts as one whose tensors others keep.
_saved_tensors_hooks: Callable[[bool], Any] = getattr(
    _internals._autograd, "_top_saved_tensors_default_hooks", lambda _: True
)

Rate = tuple[bool, float | None]
"""Whether a hook had something to do, and at what rate (None where there is none)."""

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
        self.rates: dict[tuple[str, int], Rate] = {}
        self.complete = True
        """Whether no call was forgotten."""

    def note(self, site: str, random_state: int, rate: Rate) -> None:
        """Remember a call, the oldest of too many making room."""
        self.rates.pop((site, random_state), None)
        self.rates[site, random_state] = rate
        if len(self.rates) > CAPACITY:
            del self.rates[next(iter(self.rates))]
            self.complete = False

    def rate_of(self, site: str, random_state: int) -> Rate | None:
        """The rate of the forward that this call repeats; None if no forward had this random state."""
        return self.rates.get((site, random_state))


def random_state() -> int:
    """A fingerprint of PyTorch's generators, on the CPU and on the accelerator in use."""
    # Not seen by those who watch operations: selective checkpoints, fake tensors, `torch.func`.
    with _internals._DisableTorchDispatch(), _internals._DisableFuncTorch():
        states = [torch.default_generator.get_state()]
        if torch.accelerator.is_available():
            module = torch.get_device_module(torch.accelerator.current_accelerator())
            asked = getattr(module, "is_initialized", lambda: True)()
            if asked and not getattr(module, "is_current_stream_capturing", lambda: False)():
                states.append(module.get_rng_state())
        # The Mersenne Twister's position and its first words tell as much as all of its 5,056 bytes.
        return hash(tuple(tuple(state[:64].tolist()) for state in states))

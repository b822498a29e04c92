"""Telling tensors that are numbers in memory from those that stand for something else."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def plain(x: Tensor) -> bool:
    """Whether `x` is numbers in memory as they are, and nobody watches the operations on it (to trace them, say)."""
    watched = torch._C._get_tracing_state() is not None or torch._C._len_torch_dispatch_stack() > 0
    # A negated view is the memory of the other sign.
    return type(x) in (Tensor, nn.Parameter) and not (watched or x.is_neg()) and has_memory(x)


def has_memory(x: Tensor) -> bool:
    """Whether there is memory of its own to write to: not so a batch of gradients, or a gradient of 0."""
    return torch._C._has_storage(x) and not x._is_zerotensor()


def must_not_wait(x: Tensor) -> bool:
    """Whether no value may be asked for: on other devices than the CPU, and where there is none, as in a trace.

    It must not depend on who else watches, or a mask would change with a profiler.
    """
    if x.device.type != "cpu" or type(x) not in (Tensor, nn.Parameter):
        return True
    if torch._C._len_torch_dispatch_stack() == 0:
        return False
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return get_proxy_mode() is not None


def transformed() -> bool:
    """Whether the compiler or a `torch.func` transform is at work: they rewrite what is written in place."""
    return torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None

"""Every private PyTorch name that hookdrop uses, so that a new PyTorch is checked against one file.

`tests/unit/utils/test_torch_internals.py` has a canary for each: it says what breaks if PyTorch removes the name.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import operator
import sys
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd import forward_ad
from torch.nn.modules.batchnorm import _BatchNorm

_C: Any = torch._C
_jit: Any = torch.jit

# --- modules

BatchNorm: type[nn.Module] = _BatchNorm
"""What all batch norms derive from: they write to buffers in training mode."""

children_of: Callable[[nn.Module], dict[str, nn.Module | None]] = operator.attrgetter("_modules")
"""A module's children by name; `named_children` leaves out the second name of a shared one."""

parameters_of: Callable[[nn.Module], dict[str, nn.Parameter | None]] = operator.attrgetter("_parameters")
"""The table of a module's own parameters."""

buffers_of: Callable[[nn.Module], dict[str, Tensor | None]] = operator.attrgetter("_buffers")
"""The table of a module's own buffers, which dry runs exchange for copies."""

HOOK_TABLES = (
    ("_forward_hooks", ("_forward_hooks_with_kwargs", "_forward_hooks_always_called")),
    ("_forward_pre_hooks", ("_forward_pre_hooks_with_kwargs",)),
)
"""The attributes of a module that hold its hooks by id, each with those that hold more about some of them."""

# --- tensors

has_storage: Callable[[Tensor], bool] = _C._has_storage
"""Whether a tensor has memory: a batch of gradients inside of `vmap` has none."""

is_zero_tensor: Callable[[Tensor], bool] = Tensor._is_zerotensor
"""Whether a tensor is a gradient of 0 without memory."""


version_of: Callable[[Tensor], int] = attrgetter("_version")
"""How often a tensor was written to in place."""

# --- who watches or rewrites operations

dispatch_modes: Callable[[], int] = _C._len_torch_dispatch_stack
"""How many dispatch modes (fake tensors, tracing, profiling of operations) are active."""

is_tracing: Callable[[], bool] = _jit.is_tracing
"""Whether `torch.jit.trace` records operations: public, but without types."""

functorch_stack: Callable[[], Any] = _C._functorch.peek_interpreter_stack
"""The innermost `torch.func` transform; None outside of all."""

without_dispatch_modes: Callable[[], Any] = _C._DisableTorchDispatch
"""A context in which no dispatch mode sees an operation."""

without_functorch: Callable[[], Any] = _C._DisableFuncTorch
"""A context in which no `torch.func` transform sees an operation."""

disable_dynamo = _disable_dynamo
"""`torch.compiler.disable`, but without importing the compiler."""

forward_ad_level: Callable[[], int] = partial(getattr, forward_ad, "_current_level")
"""How many levels of forward-mode derivatives are being computed, less one: -1 outside of all."""


def is_proxy_tracing() -> bool:
    """Whether `make_fx` records operations."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return get_proxy_mode() is not None


def vmap_levels() -> list[Any]:
    """The `vmap` transforms around this call, outermost first."""
    # Imported here, as it loads much that an import of hookdrop needs not.
    from torch._functorch.pyfunctorch import VmapInterpreter, retrieve_all_functorch_interpreters

    return [one for one in retrieve_all_functorch_interpreters() if isinstance(one, VmapInterpreter)]


def mark_vmap_slices(zeros: Tensor, level: int) -> Tensor:
    """`zeros` as one tensor for each slice of the `vmap` at `level`."""
    marked: Tensor = _C._functorch._add_batch_dim(zeros, 0, level)
    return marked


# --- the backward pass

graph_task: Callable[[], int] = _C._current_graph_task_id
"""The id of the running backward pass; -1 outside of one."""

sequence_number: Callable[[], int] = _C._autograd._get_sequence_nr
"""The number that the next autograd node gets."""

current_node: Callable[[], Any] = _C._current_autograd_node
"""The autograd node that is running."""

number_of: Callable[[Any], int] = operator.methodcaller("_sequence_nr")
"""The number of an autograd node."""

saved_tensors_hooks: Callable[[bool], Any] | None = getattr(_C._autograd, "_top_saved_tensors_default_hooks", None)
"""The innermost hooks on saved tensors, or None if there are none; itself None before PyTorch 2.8."""

# --- the compiler


def compiler_is_imported() -> bool:
    """Whether anything can have been compiled."""
    return "torch._dynamo" in sys.modules


def guard_hooks() -> bool:
    """Have compiled code check its modules' hooks before it is reused; whether any was compiled that does not.

    By default, compiled code ignores hooks that are placed after it was compiled, and of two models of one class the
    one with hooks may run the code of the other.
    """
    config: Any = sys.modules["torch._dynamo.config"]
    unguarded = bool(config.skip_nnmodule_hook_guards) and _something_is_compiled()
    config.skip_nnmodule_hook_guards = False
    return unguarded


def _something_is_compiled() -> bool:
    frames = getattr(sys.modules.get("torch._dynamo.convert_frame"), "FRAME_COUNTER", 0)
    # torch.export traces frames too, but has no backend, or one of its own.
    backends = getattr(sys.modules.get("torch._dynamo.eval_frame"), "cached_backends", {0: "unknown"}).values()
    return bool(frames) and any(
        backend is not None and not getattr(backend, "__qualname__", "").startswith("export.") for backend in backends
    )


def when_compiler_is_imported(callback: Callable[[], None]) -> None:
    """Call `callback` once `torch._dynamo` is imported: now, or later, after the import statement of somebody else."""
    if compiler_is_imported():
        importlib.import_module("torch._dynamo")  # waits where another thread is importing it
        callback()
    else:
        sys.meta_path.insert(0, _AfterImport("torch._dynamo", callback))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds one module as the other finders do, and has a callback run after it."""

    def __init__(self, name: str, callback: Callable[[], None]) -> None:
        self.name, self.callback = name, callback

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = partial(self._run, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec

    def _run(self, exec_module: Callable[[ModuleType], None], module: ModuleType) -> None:
        exec_module(module)
        self.callback()


# --- distributed jobs


def default_store() -> Any:
    """The key-value store of the job, through which ranks exchange notes; None if its backend has none."""
    return dist.distributed_c10d._get_default_store()

"""All private PyTorch names that hookdrop uses, collected in one file to simplify support of new PyTorch versions.

`tests/unit/core/test_torch_internals.py` has a canary test for each name that documents what breaks without it.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import attrgetter, methodcaller
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd import forward_ad
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils import _python_dispatch

_C: Any = torch._C
_jit: Any = torch.jit
_module: Any = torch.nn.modules.module

# --- modules

BatchNorm: type[nn.Module] = _BatchNorm  # the base class of all batch norms

# The tables of a module, without those of its children. `named_children` omits the second name of a shared child.
children_of: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")
parameters_of: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter("_parameters")
buffers_of: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")
# PyTorch attaches these to the output of the module, after the forward hooks.
full_backward_hooks_of: Callable[[nn.Module], dict[int, Any]] = attrgetter("_backward_hooks")

HOOK_TABLES = (
    ("_forward_hooks", ("_forward_hooks_with_kwargs", "_forward_hooks_always_called")),
    ("_forward_pre_hooks", ("_forward_pre_hooks_with_kwargs",)),
)
"""The module attributes that map ids to hooks, each with the attributes that hold flags of these hooks."""

global_forward_hooks: tuple[dict[int, Any], ...] = (_module._global_forward_pre_hooks, _module._global_forward_hooks)
"""The hooks that run at every call of any module."""


# --- tensors

has_storage: Callable[[Tensor], bool] = _C._has_storage  # batched gradients inside `vmap` have no memory
is_zero_tensor: Callable[[Tensor], bool] = Tensor._is_zerotensor  # an all-zero gradient without memory
version_of: Callable[[Tensor], int] = attrgetter("_version")  # the number of in-place modifications


def storage_of(tensor: Tensor) -> int:
    """Return a number that tensors with the same memory share, with values or without; 0 if there is no memory."""
    return int(tensor.untyped_storage()._cdata) if has_storage(tensor) else 0


# Subclasses with a `__torch_function__`, such as MONAI's MetaTensor:
PLAIN_TYPES = (Tensor, nn.Parameter)  # no such subclasses; comparing with them is the fastest check


def wraps_results(x: Tensor) -> bool:
    """Whether the type of `x` wraps results in `__torch_function__` and stores its values in ordinary memory."""
    return has_torch_function((x,)) and type(x).__torch_dispatch__ is Tensor.__torch_dispatch__


def on_plain_tensor(function: Callable[..., Tensor], x: Tensor, *settings: Any) -> Tensor:
    """Call `function` on the plain tensor and let modes and the subclass wrap the result, as for PyTorch's functions.

    An autograd function must not get the subclass, which would wrap the result in a view that cannot change in place.
    """
    if has_torch_function((x,)):
        return handle_torch_function(on_plain_tensor, (x,), function, x, *settings)
    return function(x.as_subclass(Tensor), *settings)


# --- modes and transforms that intercept operations


def is_fake(x: Tensor) -> bool:
    """Whether a tensor was made in a `FakeTensorMode`, so that it has no values."""
    from torch._subclasses.fake_tensor import is_fake

    return bool(is_fake(x))


@contextmanager
def fake_tensors() -> Iterator[Any]:
    """Yield a mode in which tensors have shapes but no values. Parameters of any model can be used inside."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # slow to import

    logger = logging.getLogger("torch._subclasses.fake_tensor")  # it prints a traceback for each wrong shape
    disabled, logger.disabled = logger.disabled, True
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            yield mode
    finally:
        logger.disabled = disabled


dispatch_modes: Callable[[], int] = _C._len_torch_dispatch_stack  # how many: fake tensors, tracing, profiling, ...
without_dispatch_mode: Callable[[], Any] = _python_dispatch._pop_mode_temporarily  # takes the innermost off the stack
is_tracing: Callable[[], bool] = _jit.is_tracing  # whether `torch.jit.trace` is recording; public, but untyped
functorch_stack: Callable[[], Any] = _C._functorch.peek_interpreter_stack  # the innermost transform, or None
forward_ad_level: Callable[[], int] = partial(getattr, forward_ad, "_current_level")  # -1 if it is not active

without_dispatch_modes: Callable[[], Any] = _C._DisableTorchDispatch  # hides operations from all of these
without_functorch: Callable[[], Any] = _C._DisableFuncTorch  # from all transforms of `torch.func`
without_function_modes: Callable[[], Any] = _C.DisableTorchFunction  # and from `__torch_function__` of subclasses

disable_dynamo = _disable_dynamo  # `torch.compiler.disable` without importing the compiler


def is_proxy_tracing() -> bool:
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return get_proxy_mode() is not None


def vmap_randomness() -> tuple[str, ...]:
    """Return the `randomness` of each active `torch.func.vmap`."""
    if functorch_stack() is None:
        return ()
    # Imported lazily: this module is slow to import.
    from torch._functorch.pyfunctorch import VmapInterpreter, retrieve_all_functorch_interpreters

    levels = retrieve_all_functorch_interpreters()
    return tuple(level.randomness() for level in levels if isinstance(level, VmapInterpreter))


# Function modes:


def opened(function: Any) -> Any:
    """Return a copy of a function of `torch.nn.functional` that shows its operations to the active mode.

    The function itself would only show itself, again and again.
    """
    # Without the name of a module, the compiler looks up the names here, and not in the module.
    names = {name: value for name, value in vars(sys.modules[function.__module__]).items() if name != "__name__"}
    names["has_torch_function"] = lambda tensors: False
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def remove_function_mode(mode: Any) -> None:
    """Remove a mode of this thread, also from below others."""
    above = []
    while _C._len_torch_function_stack() and (top := _C._pop_torch_function_stack()) is not mode:
        above.append(top)
    for other in reversed(above):
        _C._push_on_torch_function_stack(other)


# --- the backward pass

graph_task: Callable[[], int] = _C._current_graph_task_id  # the id of the running backward pass; -1 if none runs
at_end_of_backward: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
sequence_number: Callable[[], int] = _C._autograd._get_sequence_nr  # that of the next autograd node
current_node: Callable[[], Any] = _C._current_autograd_node  # the autograd node whose backward is running
node_sequence_number: Callable[[Any], int] = methodcaller("_sequence_nr")

saved_tensors_hooks: Callable[[bool], Any] | None = getattr(_C._autograd, "_top_saved_tensors_default_hooks", None)
"""Returns the innermost saved-tensors hooks, or None if there are none. Unavailable (None) before PyTorch 2.8."""

# --- the compiler


def compiler_is_imported() -> bool:
    return "torch._dynamo" in sys.modules


def enable_hook_guards() -> bool:
    """Make compiled code guard on module hooks. Returns whether code was already compiled without these guards.

    By default, compiled code ignores hooks that are registered after compilation, and two models of one class may
    share compiled code even if only one of them has hooks.
    """
    config: Any = sys.modules["torch._dynamo.config"]
    unguarded, config.skip_nnmodule_hook_guards = config.skip_nnmodule_hook_guards, False
    frames = getattr(sys.modules.get("torch._dynamo.convert_frame"), "FRAME_COUNTER", 0)
    # torch.export also traces frames, but without a backend or with its own.
    backends = getattr(sys.modules.get("torch._dynamo.eval_frame"), "cached_backends", {0: "unknown"}).values()
    names = [getattr(backend, "__qualname__", "") for backend in backends if backend is not None]
    return bool(unguarded and frames) and not all(name.startswith("export.") for name in names)


def runs_compiled_code() -> bool:
    """Whether Python runs functions inside a compiled call, but outside of its graphs, and compiles them one by one."""
    if "torch._dynamo" not in sys.modules:
        return False
    # Not `get_eval_frame_callback`, which in PyTorch 2.6 returns a reference that it does not own: a crash.
    callback = _C._dynamo.eval_frame.set_eval_frame(None)
    _C._dynamo.eval_frame.set_eval_frame(callback)
    return callable(callback)


def skip_frames_of(*functions: Any) -> None:
    """Do not compile functions where Python calls them; compiled code that calls them still traces into them."""
    for function in functions:
        importlib.import_module("torch._dynamo.eval_frame").skip_code(function.__code__)


def recomputes_forward() -> bool:
    """Whether the code being compiled may recompute any operation of the forward in the backward pass.

    It does so to save memory, if its activation memory budget is below 1. Random operations then draw again, except
    those inside an activation checkpoint (pytorch#190717).
    """
    config: Any = importlib.import_module("torch._functorch.config")
    region: Any = importlib.import_module("torch.fx.traceback").current_meta.get("custom") or {}
    return bool(
        config.activation_memory_budget < 1.0
        or region.get("_region_activation_memory_budget", 1.0) < 1.0
        # The budget of any region in the graph then applies to the whole graph.
        or not getattr(config, "activation_memory_budget_require_full_coverage", True)
    )


def can_replay_random_operators() -> bool:
    """Whether a random operator inside an activation checkpoint draws the same numbers in a recompute.

    Before PyTorch 2.11, there is an error if the backward pass does not need the result (pytorch#172730).
    """
    version: Any = torch.__version__
    return version >= (2, 11) and functorch_stack() is None


def has_faulty_random_kernels() -> bool:
    """Whether fused random functions on CUDA repeat numbers, and differ in a recompute (pytorch#198333).

    They do so in PyTorch 2.13 and 2.14, and later if the setting `use_rand4x` is on. A `vmap` needs them nevertheless,
    to draw different numbers for each slice.
    """
    config: Any = importlib.import_module("torch._inductor.config")
    version: Any = torch.__version__
    faulty = getattr(config, "use_rand4x", (2, 13) <= version < (2, 15))
    return bool(faulty) and functorch_stack() is None


constants_of_a_trace = (vmap_randomness, recomputes_forward, can_replay_random_operators, has_faulty_random_kernels)
"""Functions that compiled code must not trace into: it treats their results as constants."""


def when_compiler_is_imported(callback: Callable[[], None]) -> None:
    """Call `callback` once `torch._dynamo` is imported: immediately, or right after a later import."""
    if compiler_is_imported():
        importlib.import_module("torch._dynamo")  # waits if another thread is importing it
        callback()
        return
    if not _callbacks:
        sys.meta_path.insert(0, _AfterImport())
    _callbacks.append(callback)


_callbacks: list[Callable[[], None]] = []


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds the compiler with the other finders, and calls the callbacks after its execution."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "torch._dynamo":
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (execute(module), [callback() for callback in _callbacks])
        return spec


# --- distributed jobs


def default_store() -> Any:
    """Return the key-value store shared by all ranks of the job, or None if the backend has none."""
    return dist.distributed_c10d._get_default_store()

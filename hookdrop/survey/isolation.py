"""Run a model without side effects."""

from __future__ import annotations

import copy
import functools
import itertools
import operator
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import CellType, FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookdrop.core.errors import HookdropError, InjectionError, warn
from hookdrop.core.selection import named_layers
from hookdrop.core.tables import some
from hookdrop.core.tensor_tree import describe
from hookdrop.core.torch_internals import (
    HOOK_TABLES,
    BatchNorm,
    buffers_of,
    compiler_is_imported,
    global_forward_hooks,
    version_of,
)

Training: TypeAlias = bool | Collection[nn.Module]
"""Whether a model is in training mode, or which of its modules are."""

_SMALL = 2**20  # bytes


@contextmanager
def restored_after(model: nn.Module, *, trains: bool = True) -> Iterator[None]:
    """Restore training flags, buffers (batch-norm statistics) and RNG states on exit.

    Calls inside write to copies of the buffers, because writing old values back would be an in-place change under a
    live graph. Large buffers that no known layer writes to are not copied: in a quantized language model, these are the
    weights. If a forward modifies one nevertheless, a warning names it.

    Args:
        model: the model that runs inside.
        trains: whether it may run in training mode, in which layers update statistics, queues and codebooks.
            Floating-point buffers of any size are then copied.

    Raises:
        InjectionError: the model has lazy parameters, which its first forward would initialize.
    """
    lazy = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if is_lazy(tensor)]
    if lazy:
        raise InjectionError(
            f"the model has lazy parameters ({some(lazy)}): a forward would initialize them, which changes the model.\n"
            "  run one forward first: model(x)"
        )
    with forked_rng(model), _copied_buffers(model, trains), _restored_modes(model):
        yield


@contextmanager
def _restored_modes(model: nn.Module) -> Iterator[None]:
    flags = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training


def set_modes(model: nn.Module, training: Training = False) -> None:
    """Set only the training flags: `eval()` may have side effects, such as merging LoRA weights.

    Batch norms stay in eval mode, because in training mode they fail for one small map.
    """
    for module in model.modules():
        trains = training if isinstance(training, bool) else module in training
        module.training = trains and not isinstance(module, BatchNorm)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Set the training flags to eval mode inside, and restore them on exit."""
    with _restored_modes(model):
        set_modes(model)
        yield


@contextmanager
def _copied_buffers(model: nn.Module, trains: bool) -> Iterator[None]:
    tables = [(buffers_of(module), dict(buffers_of(module))) for module in model.modules()]
    copied = {
        id(buffer): buffer
        for module in model.modules()
        for buffer in buffers_of(module).values()
        if buffer is not None and _may_be_written_to(module, buffer, trains)
    }
    # One copy per buffer, so that shared buffers stay shared.
    copies = {key: buffer.detach().clone() for key, buffer in copied.items()}
    uncopied = [(name, x, version_of(x)) for name, x in model.named_buffers() if id(x) not in copies]
    try:
        for table, originals in tables:
            for name, buffer in originals.items():
                table[name] = copies.get(id(buffer), buffer)
        yield
    finally:
        for table, originals in tables:
            if [*table.keys()] != [*originals]:  # the forward has registered or deleted a buffer
                table.clear()
            for name, buffer in originals.items():
                table[name] = buffer
        if modified := [name for name, buffer, version in uncopied if version_of(buffer) != version]:
            warn(
                f"this forward modified {some(modified)}, which {'is' if len(modified) == 1 else 'are'} too large to "
                "be copied first, so the model keeps the new values.\n"
                "  reload the model's state. Without example_input=, inject runs no forward."
            )


def _may_be_written_to(module: nn.Module, buffer: Tensor, trains: bool) -> bool:
    if isinstance(module, BatchNorm) or buffer.numel() * buffer.element_size() <= _SMALL:
        return True
    # Inference tensors have no version counter, so a change would go unnoticed.
    return buffer.is_inference() or (trains and buffer.is_floating_point() and buffer.element_size() > 1)


@contextmanager
def restored_objects(model: nn.Module, example: Any = None) -> Iterator[Callable[[], list[Tensor]]]:
    """Restore the attributes of all modules and the containers in an example; remove fake tensors stored elsewhere.

    Those may be in objects that modules hold, in the globals and closures of the code of a model, in the globals of the
    modules that it imports, and in caches of functions. Inside, a function returns the tensors that were stored since.
    """
    own = [cls for cls in {cls for module in model.modules() for cls in type(module).__mro__} if _is_foreign(cls)]
    code, imported = _globals_of(own)
    attributes = [vars(module) for module in model.modules()]
    captured = [_captured(value) for table in (*attributes, *map(vars, own)) for value in table.values()]
    given = _tables([[example]])
    near = [table for module in imported for value in _values(module) if (table := _inside(value)) is not None]
    tables = _tables([*attributes, *code, *(dict(vars(cls)) for cls in own), *captured, *given])
    tables = [*{id(table): table for table in (*tables, *imported, *near)}.values()]
    saved = [(table, copy.copy(table)) for table in tables if not isinstance(table, tuple)]
    values = (value for table in (*code, *imported, *map(vars, own)) for value in list(table.values()))
    functions = {id(one): one for value in values for one in (value, *_captured(value)) if type(one) is _LRU_CACHE}
    cached = [(one, one.cache_info().misses) for one in functions.values()]
    always = {id(one) for table in attributes for one in (table, *table.values())} | {*map(id, given)}

    def changed() -> list[tuple[Any, Any]]:
        return [(table, old) for table, old in saved if not _is_same(table, old)]

    def added(table: Any, old: Any) -> list[Any]:
        known = {*map(id, _values(old))}
        return [value for value in _values(table) if id(value) not in known]

    def stored() -> list[Tensor]:
        known = {id(value) for _, old in saved for value in _values(old)}
        every = [value for one in _tables([added(*pair) for pair in changed()]) for value in _values(one)]
        return [value for value in every if issubclass(type(value), Tensor) and id(value) not in known]

    try:
        yield stored
    finally:
        for table, old in changed():
            if id(table) in always or _has_fake_tensors(added(table, old)):
                table.clear()
                table.extend(old) if isinstance(table, list | deque) else table.update(old)
        for function, misses in cached:
            if function.cache_info().misses != misses:
                function.cache_clear()


def _globals_of(classes: Iterable[type]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the globals of the code of some classes, and those of other code that it has imported."""
    code = {cls.__module__ for cls in classes} & sys.modules.keys()
    imported = {_module_of(value) for name in code for value in _values(vars(sys.modules[name]))} & sys.modules.keys()
    return [vars(sys.modules[name]) for name in code], [vars(sys.modules[name]) for name in imported - code]


def _module_of(value: Any) -> str:
    """Return the name of a module that is not PyTorch's or Python's, or of the one that defines a function or class."""
    kind = type(value)  # `isinstance` runs code of proxies
    if not issubclass(kind, ModuleType | FunctionType | _LRU_CACHE | type):
        return ""
    name = str(getattr(value, "__name__" if issubclass(kind, ModuleType) else "__module__", ""))
    return "" if _is_of_pytorch_or_python(name) else name


def _captured(value: Any) -> list[Any]:
    """Return the variables that a function takes from the function around it."""
    # By `type`, because `isinstance` runs code of proxies.
    function = value.__func__ if type(value) in (staticmethod, classmethod) else value
    cells = (function.__closure__ or ()) if type(function) is FunctionType else ()
    return [cell.cell_contents for cell in cells if cell != _EMPTY]


@contextmanager
def hooked(model: nn.Module, before: Callable[..., None], after: Callable[..., Any]) -> Iterator[None]:
    """Call `before(name, module, args, kwargs)` and `after(name, module, args, output)` at each call of a layer inside.

    These hooks are the last ones, so they see what a hook of hookdrop would see. What `after` returns, unless None,
    replaces the output.
    """
    with ExitStack() as stack:
        for layer in named_layers(model):
            if not isinstance(layer.module, torch.jit.ScriptModule):
                first, last = functools.partial(before, layer.name), functools.partial(after, layer.name)
                stack.callback(layer.module.register_forward_pre_hook(first, with_kwargs=True).remove)
                stack.callback(layer.module.register_forward_hook(last).remove)
        yield


def other_hooks(model: nn.Module) -> list[Any]:
    """Return the forward hooks on a model and on all modules that neither PyTorch nor hookdrop defines."""
    hooked = [module for module in model.modules() if module._forward_hooks or module._forward_pre_hooks]
    tables = [getattr(module, name) for module in hooked for name, _ in HOOK_TABLES]
    hooks = [hook for table in (*global_forward_hooks, *tables) for hook in table.values()]
    return [hook for hook in hooks if _package(hook) not in ("torch", "hookdrop")]


def _package(what: Any) -> str:
    """Return the package that defines a function or a class."""
    inner = what.func if isinstance(what, functools.partial) else what
    return str(getattr(inner, "__module__", "")).partition(".")[0]


def _is_of_pytorch_or_python(module: str) -> bool:
    package = module.partition(".")[0]
    return package == "torch" or package in sys.stdlib_module_names


def attributes_of(value: Any) -> dict[str, Any] | None:
    """Return the attributes of an object that holds settings or caches, without running its code; None for others."""
    kind = type(value)
    if not kind.__dictoffset__ or not _is_foreign(kind) or issubclass(kind, nn.Module | Tensor | type):
        return None
    return object.__getattribute__(value, "__dict__")  # type: ignore[no-any-return]


def _is_foreign(cls: type) -> bool:
    return cls is SimpleNamespace or not _is_of_pytorch_or_python(cls.__module__)


def _tables(roots: Iterable[Any]) -> list[Any]:
    """Return the containers and the attributes of objects that can be reached from some tables, these included.

    From each value in these, a bounded number is reached, the nearest first: some objects, such as the interactive
    shell in the globals of a notebook, lead to all that there is.
    """
    found: dict[int, Any] = {}
    for root in roots:
        found.setdefault(id(root), root)
        for value in _values(root):
            waiting = deque([value])
            for _ in range(_MOST):
                if not waiting:
                    break
                table = _inside(waiting.popleft())
                if table is not None and id(table) not in found:
                    found[id(table)] = table
                    waiting.extend(itertools.islice(_values(table), _MOST))
    return list(found.values())


_MOST = 2048


def _inside(value: Any) -> Any:
    """Return a container itself, and the attributes of an object; None for other values."""
    kind = type(value)  # `isinstance` runs code of proxies
    if kind in _CONTAINERS or issubclass(kind, tuple):
        return value
    return (
        vars(value) if issubclass(kind, nn.Module) else attributes_of(value)
    )  # such as one that is no part of a model


def _values(table: Any) -> list[Any]:
    return list(table.values() if isinstance(table, dict) else table)


def _is_same(table: Any, old: Any) -> bool:
    """Whether a container has the same elements in the same order as its copy."""
    if len(table) != len(old) or isinstance(table, set):
        return isinstance(table, set) and table == old
    parts = [(table, old), (table.values(), old.values())] if isinstance(table, dict) else [(table, old)]
    return all(all(map(operator.is_, *part)) for part in parts)


def _has_fake_tensors(table: list[Any]) -> bool:
    values = (value for one in _tables([table]) for value in _values(one))
    return any(type(value).__name__ == "FakeTensor" for value in values)


_CONTAINERS = (dict, list, set, OrderedDict, defaultdict, deque)
_LRU_CACHE = type(functools.lru_cache(int))
_EMPTY = CellType()


@contextmanager
def forked_rng(*where: nn.Module | Tensor) -> Iterator[None]:
    """Restore the RNG states of Python, NumPy, PyTorch and the accelerators in use on exit."""
    tensors = [t for w in where for t in ([w] if isinstance(w, Tensor) else [*w.parameters(), *w.buffers()])]
    devices = {t.device for t in tensors if t.device.type not in ("cpu", "meta")}
    kinds = {device.type for device in devices}
    if len(kinds) > 1:
        raise InjectionError(f"the model is on several types of accelerators ({', '.join(sorted(kinds))}).")
    indices = sorted({device.index or 0 for device in devices})
    states = random.getstate(), sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
    try:
        with torch.random.fork_rng(indices, device_type=next(iter(kinds), "cuda")):
            yield
    finally:
        random.setstate(states[0])
        if states[1] is not None:
            sys.modules["numpy"].random.set_state(states[1])


def rng_states(devices: Iterable[str]) -> list[Tensor]:
    """Return the states of PyTorch's generators on the CPU and on accelerators of these types."""
    states = (state for device in devices for state in torch.get_device_module(device).get_rng_state_all())
    return [torch.default_generator.get_state(), *states]


def uncompiled() -> AbstractContextManager[Any]:
    """Run compiled code uncompiled inside, so that no hook is ignored. Does nothing if the compiler is not imported."""
    stance: Any = torch.compiler.set_stance
    return stance("force_eager") if compiler_is_imported() else nullcontext()


class Arguments(NamedTuple):
    """An example with both positional and keyword arguments."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def call(model: Callable[..., Any], example: Any) -> Any:
    """Call `model` with a tensor (or any single argument), a tuple of arguments, or a mapping of keyword arguments.

    A compiled model runs uncompiled, so that no hook is ignored.

    Raises:
        InjectionError: the model does not accept the example.
    """
    try:
        with uncompiled():
            if isinstance(example, Arguments):
                return model(*example.args, **example.kwargs)
            if isinstance(example, tuple):
                return model(*example)
            if isinstance(example, Mapping):
                return model(**example)
            return model(example)
    except HookdropError:
        raise
    except Exception as error:
        advice = "pass a tensor, a tuple of arguments or a dict of keyword arguments"
        if isinstance(example, tuple | list) and example and all(isinstance(size, int) for size in example):
            advice = f"pass a tensor, not its shape: torch.randn({', '.join(map(str, example))})"
        elif hasattr(example, "__array__") and not isinstance(example, Tensor):
            advice = "pass a tensor: torch.as_tensor(x)"
        raise InjectionError(
            f"the model does not accept this example, {describe(example)}:\n  {type(error).__name__}: {error}\n"
            f"  {advice}, on the model's device."
        ) from error

"""Running a model without leaving a trace."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer

from hookdrop.errors import HookdropError, InjectionError
from hookdrop.utils.tensor_tree import describe


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Training flags, buffers (batch-norm statistics) and the random state are put back at the end."""
    flags = [(module, module.training) for module in model.modules()]
    buffers = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    with forked_rng(model):
        try:
            # The model runs on copies: writing the old values back would be an in-place change under a live graph.
            twins: dict[int, Tensor] = {}
            for table, originals in buffers:
                table.update({name: _twin(buffer, twins) for name, buffer in originals.items()})
            yield
        finally:
            for module, training in flags:
                module.training = training
            for table, originals in buffers:
                table.clear()
                table.update(originals)


def _twin(buffer: Tensor | None, twins: dict[int, Tensor]) -> Tensor | None:
    """One copy for each buffer, so that shared buffers stay shared."""
    if buffer is None or isinstance(buffer, UninitializedBuffer):
        return buffer
    return twins.setdefault(id(buffer), buffer.detach().clone())


@contextmanager
def forked_rng(*where: nn.Module | Tensor) -> Iterator[None]:
    """Python's, NumPy's and PyTorch's generators and those of the accelerators in use are put back at the end."""
    tensors = [t for w in where for t in ([w] if isinstance(w, Tensor) else [*w.parameters(), *w.buffers()])]
    devices = {t.device for t in tensors if t.device.type not in ("cpu", "meta")}
    kinds = {device.type for device in devices}
    if len(kinds) > 1:
        raise InjectionError(f"the model is on devices of several kinds ({', '.join(sorted(kinds))}).")
    indices = sorted({device.index or 0 for device in devices})
    others = random.getstate(), sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
    try:
        with torch.random.fork_rng(indices, device_type=next(iter(kinds), "cuda")):
            yield
    finally:
        random.setstate(others[0])
        if others[1] is not None:
            sys.modules["numpy"].random.set_state(others[1])


def uncompiled() -> AbstractContextManager[Any]:
    """Compiled code runs uncompiled inside, so that hooks are seen. What is not loaded has compiled nothing."""
    loaded = "torch._dynamo" in sys.modules
    stance: Any = torch.compiler.set_stance
    return stance("force_eager") if loaded else nullcontext()


def call(model: nn.Module, example: Any) -> Any:
    """`model` on a tensor (or any one argument), a tuple of arguments, or a mapping of keyword arguments.

    A compiled model runs uncompiled, so that hooks are seen.

    Raises:
        InjectionError: the model does not take it.
    """
    try:
        with uncompiled():
            if isinstance(example, tuple):
                return model(*example)
            if isinstance(example, Mapping):
                return model(**example)
            return model(example)
    except HookdropError:
        raise
    except Exception as error:
        raise InjectionError(
            f"the model does not take this example, {describe(example)}:\n  {type(error).__name__}: {error}\n"
            f"  {_advice(example)}, on the model's device."
        ) from error


def _advice(example: Any) -> str:
    if isinstance(example, tuple | list) and example and all(isinstance(size, int) for size in example):
        return f"give a tensor, not its shape: torch.randn({', '.join(map(str, example))})"
    return "give a tensor, a tuple of arguments or a dict of keyword arguments, as the model is called with"

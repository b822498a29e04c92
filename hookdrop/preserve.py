"""Running a model without leaving a trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hookdrop.errors import InjectionError


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Training flags, buffers (batch-norm statistics) and the random state are put back at the end."""
    flags = [(module, module.training) for module in model.modules()]
    buffers = [
        (module._buffers, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    with forked_rng(model):
        try:
            yield
        finally:
            for module, training in flags:
                module.training = training
            with torch.no_grad():
                for owner, name, buffer, before in buffers:
                    owner[name] = buffer
                    if not buffer.is_meta:
                        buffer.copy_(before)


@contextmanager
def forked_rng(*where: nn.Module | Tensor) -> Iterator[None]:
    """The CPU's generator and those of the accelerators in use are put back at the end."""
    tensors = [t for w in where for t in ([w] if isinstance(w, Tensor) else [*w.parameters(), *w.buffers()])]
    devices = {t.device for t in tensors if t.device.type not in ("cpu", "meta")}
    kinds = {device.type for device in devices}
    if len(kinds) > 1:
        raise InjectionError(f"the model is on devices of several kinds ({', '.join(sorted(kinds))}).")
    indices = sorted({device.index or 0 for device in devices})
    with torch.random.fork_rng(indices, device_type=next(iter(kinds), "cuda")):
        yield


def call(model: nn.Module, example: Any) -> Any:
    """`model` on a tensor (or any one argument), a tuple of arguments, or a mapping of keyword arguments.

    A compiled model runs uncompiled, so that hooks are seen.
    """
    with torch.compiler.set_stance("force_eager"):
        if isinstance(example, tuple):
            return model(*example)
        if isinstance(example, Mapping):
            return model(**example)
        return model(example)

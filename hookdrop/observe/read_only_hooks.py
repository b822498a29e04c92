"""Temporary hooks that only read."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from hookdrop.errors import InjectionError, ShapeError, nothing_placed
from hookdrop.hooks import compiling
from hookdrop.survey.isolation import uncompiled
from hookdrop.utils.select import Entries, Layer, select
from hookdrop.utils.tensor_tree import TensorKey, describe, map_tensor, tensors
from hookdrop.utils.torch_internals import functorch_stack

HookFunction = Callable[..., None]


class LayerObserver(ABC):
    """Observes one layer, under all of its names, until `is_open` is False."""

    def __init__(self, layer: Layer) -> None:
        self.name, self.module = layer.name, layer.module
        self.names = {layer.name, *layer.aliases, *layer.wrapped_names}
        self.is_open = True

    @abstractmethod
    def after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Receive the output of a call."""

    def on_gradient(self, x: Tensor, function: Callable[[Tensor], None]) -> None:
        """Call `function` with the gradient of `x`."""
        x.register_hook(lambda gradient: function(gradient) if self.is_open else None)  # type: ignore[no-untyped-call]


class ReadOnlyHook:
    """A hook that changes nothing. In copies and pickles of the model it is disabled."""

    def __init__(self, function: HookFunction | None) -> None:
        self.function = function

    def __call__(self, *args: Any) -> None:
        if self.function is None:
            return
        if functorch_stack() is not None:
            if sys.exc_info()[0] is not None:  # an always_call hook after an error
                return
            raise InjectionError(
                "capture() and stats() cannot be used inside torch.func (vmap, grad, ...): its tensors become invalid "
                "after it.\n  run the model directly inside the `with` block, or use torch.func outside of it."
            )
        self.function(*args)

    def __reduce__(self) -> Any:
        return ReadOnlyHook, (None,)


@contextmanager
def observed(layers: Sequence[LayerObserver], before: Sequence[tuple[nn.Module, HookFunction]] = ()) -> Iterator[None]:
    """Show the layers' calls to their observers, and call `function(module, args, kwargs)` before each.

    With `before`, the observers also see a forward that raised, with None as the output. Compiled code runs uncompiled
    inside: it would skip hooks that it was not compiled with, or recompile.
    """
    with uncompiled(), ExitStack() as handles:
        for layer in layers:
            hook = ReadOnlyHook(layer.after_forward)
            handles.enter_context(layer.module.register_forward_hook(hook, always_call=bool(before)))
        for module, function in before:
            handles.enter_context(module.register_forward_pre_hook(ReadOnlyHook(function), with_kwargs=True))
        try:
            yield
        finally:
            for layer in layers:
                layer.is_open = False


def chosen_layers(model: nn.Module, layers: Entries, exclude: Entries, what: str) -> list[Layer]:
    """Select layers as `inject` does."""
    with nothing_placed():
        compiling.raise_if_tracing(what)
        return select(model, layers, exclude).layers


def first_tensor(value: Any) -> Tensor | None:
    """Return the first floating-point tensor in `value`, else the first tensor, else None."""
    found = tensors(value)
    return next((x for x in found if x.is_floating_point()), found[0] if found else None)


def chosen_tensor(value: Any, which: TensorKey, where: str) -> Tensor:
    """Return the tensor that `which` names; None is the first."""
    if which is None:
        if (first := first_tensor(value)) is None:
            raise ShapeError(f"{where} returned {describe(value)}, which contains no tensor.\n  skip it: exclude=...")
        return first
    found: dict[int, Tensor] = {}
    try:
        map_tensor(value, which, lambda x: found.setdefault(0, x))
    except ShapeError as error:
        error.args = (f"{where} {error}",)
        raise
    return found[0]

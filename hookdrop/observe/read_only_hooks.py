"""Temporary hooks that only read, and what they saw, by layer."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Generic, TypeVar

from torch import Tensor, nn

from hookdrop.hooks import compiling
from hookdrop.survey.isolation import uncompiled
from hookdrop.utils.captures import NotRecordedError
from hookdrop.utils.errors import InjectionError, did_you_mean, nothing_placed
from hookdrop.utils.select import Entries, Layer, select
from hookdrop.utils.tables import some
from hookdrop.utils.tensor_tree import tensors
from hookdrop.utils.torch_internals import functorch_stack

HookFunction = Callable[..., None]
T = TypeVar("T")


class LayerObserver(ABC):
    """Observes one layer, under all of its names, until `is_open` is False."""

    calls: Any
    """The calls, or their number; false before the first."""

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


class ByLayer(Mapping[str, T], Generic[T]):
    """What the observers of the called layers saw, by any of a layer's names."""

    def __init__(self, observers: Sequence[Any], value: Callable[[Any], T]) -> None:
        self._observers, self._value = observers, value

    def _called(self) -> list[Any]:
        return [observer for observer in self._observers if observer.calls]

    def __getitem__(self, name: str) -> T:
        found = next((observer for observer in self._observers if name in observer.names), None)
        if found is not None and found.calls:
            return self._value(found)
        called = f"\n  called: {some(list(self)) or 'none'}"
        if found is not None:
            raise NotRecordedError(f"{name!r} was not called, or returned no tensor.{called}")
        hint = did_you_mean(name, [observer.name for observer in self._observers])
        raise NotRecordedError(f"{name!r} is not an observed layer.{hint}{called}")

    def __iter__(self) -> Iterator[str]:
        return (observer.name for observer in self._called())

    def __len__(self) -> int:
        return len(self._called())


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

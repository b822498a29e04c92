"""Temporary hooks that only read, and what they saw, by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NoReturn, TypeVar

from torch import Tensor, nn

from hookdrop.hooks import compiling
from hookdrop.survey.isolation import uncompiled
from hookdrop.utils.errors import InjectionError, NotRecordedError, did_you_mean, nothing_placed
from hookdrop.utils.select import Entries, Layer, select
from hookdrop.utils.tables import some
from hookdrop.utils.tensor_tree import tensors
from hookdrop.utils.torch_internals import functorch_stack

T = TypeVar("T")


class ByLayer(dict[str, T]):
    """What was observed, by layer name, in the order of the first calls."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        super().__init__()
        self._names = [layer.name for layer in layers]

    @property
    def never_called(self) -> list[str]:
        """The observed layers without a call."""
        return [name for name in self._names if name not in self]

    def __missing__(self, name: str) -> NoReturn:
        called = f"\n  called: {some(list(self)) or 'none'}"
        if name in self._names:
            raise NotRecordedError(f"{name!r} was not called, or returned no tensor.{called}")
        raise NotRecordedError(f"{name!r} is not an observed layer.{did_you_mean(name, self._names)}{called}")


class ReadOnlyHook:
    """Calls `function(output)` and changes nothing. In copies and pickles of the model it is disabled."""

    def __init__(self, function: Callable[[Any], None] | None = None) -> None:
        self.function = function

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.function is None:
            return
        if functorch_stack() is not None:
            raise InjectionError(
                "capture() and stats() cannot be used inside torch.func (vmap, grad, ...): its tensors become invalid "
                "after it.\n  run the model directly inside the `with` block, or use torch.func outside of it."
            )
        self.function(output)

    def __reduce__(self) -> Any:
        return ReadOnlyHook, ()


@contextmanager
def observed(layers: Sequence[Layer], function: Callable[[Layer, Any], None]) -> Iterator[None]:
    """Call `function(layer, output)` after each call of the layers.

    Compiled code runs uncompiled inside: it would skip hooks that it was not compiled with, or recompile.
    """
    with uncompiled(), ExitStack() as handles:
        for layer in layers:
            handles.enter_context(layer.module.register_forward_hook(ReadOnlyHook(partial(function, layer))))
        yield


def chosen_layers(model: nn.Module, layers: Entries, exclude: Entries, what: str) -> list[Layer]:
    """Select layers as `inject` does."""
    with nothing_placed():
        compiling.raise_if_tracing(what)
        return select(model, layers, exclude).layers


def first_tensor(value: Any) -> Tensor | None:
    """Return the first floating-point tensor in `value`, else the first tensor, else None."""
    found = tensors(value)
    return next((x for x in found if x.is_floating_point()), found[0] if found else None)

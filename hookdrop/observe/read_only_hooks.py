"""Hooks that only read, for the duration of a `with` block."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hookdrop.diagnostics.isolation import uncompiled
from hookdrop.errors import InjectionError, ShapeError, nothing_placed
from hookdrop.hooks import compiling
from hookdrop.injection.select import Entries, Layer, select
from hookdrop.utils.tensor_tree import TensorKey, describe, map_tensor, tensors
from hookdrop.utils.torch_internals import functorch_stack

Look = Callable[..., None]


class LayerObserver:
    """One layer under all of its names, and the hooks on its tensors."""

    def __init__(self, layer: Layer) -> None:
        self.name, self.module = layer.name, layer.module
        self.names = {layer.name, *layer.aliases, *layer.spellings}
        self._handles: list[RemovableHandle] = []

    def on_gradient(self, x: Tensor, fn: Callable[[Tensor], None]) -> RemovableHandle:
        """Call `fn` with the gradient of `x`."""
        self._handles = [handle for handle in self._handles if handle.hooks_dict_ref() is not None]
        self._handles.append(x.register_hook(fn))  # type: ignore[no-untyped-call]
        return self._handles[-1]

    def close(self) -> None:
        """Remove the hooks on tensors."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class ReadOnlyHook:
    """A hook that never changes what passes; copies and pickles of the model get one that does nothing."""

    def __init__(self, look: Look | None) -> None:
        self.look = look

    def __call__(self, *args: Any) -> None:
        if self.look is None:
            return
        if functorch_stack() is not None:
            if sys.exc_info()[0] is not None:  # raised already, and PyTorch calls hooks that want to know
                return
            raise InjectionError(
                "capture() and stats() cannot be used inside torch.func (vmap, grad, ...), whose tensors do not "
                "outlive it.\n  run the model directly inside the `with` block, or torch.func outside of it."
            )
        self.look(*args)

    def __reduce__(self) -> Any:
        return ReadOnlyHook, (None,)


@contextmanager
def observed(after: Iterable[tuple[nn.Module, Look]], before: Sequence[tuple[nn.Module, Look]] = ()) -> Iterator[None]:
    """Call `look(module, args, output)` after each forward, and `look(module, args, kwargs)` before one.

    With `before`, the `look` after a forward that raised is called too, with None as the output. Code that was
    compiled before runs uncompiled inside: it would skip hooks that it was not compiled with, or compile again.
    """
    with uncompiled(), ExitStack() as handles:
        for module, look in after:
            handles.enter_context(module.register_forward_hook(ReadOnlyHook(look), always_call=bool(before)))
        for module, look in before:
            handles.enter_context(module.register_forward_pre_hook(ReadOnlyHook(look), with_kwargs=True))
        yield


def chosen_layers(model: nn.Module, layers: Entries, exclude: Entries, what: str) -> list[Layer]:
    """The layers, as `inject` chooses them."""
    with nothing_placed():
        compiling.raise_if_tracing(what)
        return select(model, layers, exclude).layers


def first_tensor(value: Any) -> Tensor | None:
    """The first floating-point tensor in `value`, or else the first tensor, or None."""
    found = tensors(value)
    return next((x for x in found if x.is_floating_point()), found[0] if found else None)


def chosen_tensor(value: Any, which: TensorKey, where: str) -> Tensor:
    """The tensor that `which` names, or the first."""
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

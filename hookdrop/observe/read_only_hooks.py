"""Hooks that only look, for the length of a `with` block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hookdrop.errors import InjectionError, ShapeError, nothing_placed
from hookdrop.hooks import compiling
from hookdrop.injection.select import Entries, Layer, select
from hookdrop.utils.tensor_tree import TensorKey, change, describe, tensors

Look = Callable[..., None]


class Tap:
    """A hook that returns None whatever it sees; a copy of the model, and a pickle, has one that sees nothing."""

    def __init__(self, look: Look) -> None:
        self.look = look

    def __call__(self, *args: Any) -> None:
        if self.look is not _nothing and torch._C._functorch.peek_interpreter_stack() is not None:
            raise InjectionError(
                "capture() and stats() can't look into torch.func (vmap, grad, ...): its tensors end with it.\n"
                "  run the model plainly inside the `with` block, or torch.func outside of it."
            )
        self.look(*args)

    def __reduce__(self) -> Any:
        return Tap, (_nothing,)


def _nothing(*args: Any) -> None:
    pass


@contextmanager
def tapped(after: Iterable[tuple[nn.Module, Look]], before: Iterable[tuple[nn.Module, Look]] = ()) -> Iterator[None]:
    """`look(module, args, output)` is called after a forward, `look(module, args, kwargs)` before one.

    Compiled code runs uncompiled inside: it would skip hooks that it has not seen, or compile anew for each call.
    """
    handles: list[RemovableHandle] = []
    with torch.compiler.set_stance("force_eager"):
        try:
            handles += [module.register_forward_hook(Tap(look)) for module, look in after]
            handles += [module.register_forward_pre_hook(Tap(look), with_kwargs=True) for module, look in before]
            yield
        finally:
            for handle in handles:
                handle.remove()


def chosen_layers(model: nn.Module, layers: Entries, exclude: Entries, what: str) -> list[Layer]:
    """The layers, as `inject` chooses them."""
    with nothing_placed():
        compiling.not_while_tracing(what)
        return select(model, layers, exclude).layers


def first_tensor(value: Any) -> Tensor | None:
    """The first floating-point tensor in `value`, or the first of another kind, or None."""
    found = tensors(value)
    return next((x for x in found if x.is_floating_point()), found[0] if found else None)


def chosen_tensor(value: Any, which: TensorKey, where: str) -> Tensor:
    """The tensor that `which` names, or the first.

    Raises:
        ShapeError: there is none.
    """
    if which is None:
        first = first_tensor(value)
        if first is None:
            raise ShapeError(f"{where} gave {describe(value)}: there is no tensor in it.\n  leave it out: exclude=...")
        return first
    found: list[Tensor] = []

    def find(x: Tensor) -> Tensor:
        found.append(x)
        return x

    try:
        change(value, which, find)
    except ShapeError as error:
        error.args = (f"{where} {error}",)
        raise
    return found[0]

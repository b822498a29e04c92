"""Temporary hooks that only read; capture the tensors that a model's layers compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from hookdrop.hooks import compiling
from hookdrop.hooks.checkpointing import is_recomputing
from hookdrop.survey.isolation import uncompiled
from hookdrop.utils.errors import InjectionError, NotRecordedError, ShapeError, did_you_mean, nothing_placed, warn
from hookdrop.utils.select import Entries, Layer, select
from hookdrop.utils.tables import counted, some
from hookdrop.utils.tensor_tree import describe, detached_copy, tensors
from hookdrop.utils.torch_internals import functorch_stack
from hookdrop.utils.validation import CopyDevice, count

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
    with nothing_placed():
        compiling.raise_if_tracing(what)
        return select(model, layers, exclude).layers


def first_tensor(value: Any) -> Tensor | None:
    """Return the first floating-point tensor in `value`, else the first tensor, else None."""
    found = tensors(value)
    return next((x for x in found if x.is_floating_point()), found[0] if found else None)


@contextmanager
def capture(
    model: nn.Module,
    layers: Entries,
    gradients: bool = False,
    *,
    to: CopyDevice = None,
    last: int | None = None,
    exclude: Entries = (),
) -> Iterator[Captured]:
    """Capture the outputs of layers during the forwards inside the `with` block.

    The tensors are detached copies, safe from in-place edits, and stay available after the block. The hooks are removed
    when the block exits, also after an exception. Earlier hooks run first: at a layer with a regularizer of `inject`,
    `capture` sees its result. Recomputed forwards of activation checkpoints are not captured again. A compiled model
    runs uncompiled inside. Compile before the block, because the compiler may refuse to trace these hooks.

    Args:
        model: any module, wrapped (DistributedDataParallel, torch.compile, ...) or not.
        layers: names, globs, classes, modules, ..., as in `inject`.
        gradients: also capture the gradient of each output, as the `grad` of the captured tensor: the sum over the
            backward passes, or None if no backward pass reached it, as inside a reentrant checkpoint.
        to: device of the copies, such as `"cpu"`; None keeps the device of each tensor.
        last: number of most recent calls of each layer to keep; None keeps all.
        exclude: layers to skip.

    Yields:
        A dict from layer names to lists of tensors, one for each call: the first floating-point tensor of the output.

    Raises:
        LayerError: an entry matches no layer, or the requested layer was not captured or never called.
        ShapeError: a layer returns no tensor.
        ValueError: `last` is below 1.
        RuntimeError: the device does not exist.
        InjectionError: a forward inside runs under `torch.func`.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
        >>> with capture(model, "*", gradients=True) as seen:
        ...     model(torch.ones(2, 3)).sum().backward()
        >>> seen["0"][-1].shape, seen["1"][-1].grad.sum()
        (torch.Size([2, 4]), tensor(8.))
    """
    kept = None if last is None else count(last, "last", "capture")
    torch.empty(0, device=to)  # an unknown device raises before the first forward
    chosen = chosen_layers(model, layers, exclude, "capture()")
    seen = Captured(chosen)

    def keep(layer: Layer, output: Any) -> None:
        if is_recomputing():
            return
        if (x := first_tensor(output)) is None:
            what = f"{layer.name!r} returned {describe(output)}, which contains no tensor"
            raise ShapeError(f"{what}.\n  skip it: exclude=...")
        copy = detached_copy(x, to)
        calls = seen.setdefault(layer.name, [])
        calls.append(copy)
        if kept is not None:
            del calls[:-kept]

        def add(gradient: Tensor) -> None:
            new = detached_copy(gradient, to)
            copy.grad = new if copy.grad is None else copy.grad + new

        if gradients and x.requires_grad:
            x.register_hook(add)  # type: ignore[no-untyped-call]

    with observed(chosen, keep):
        yield seen
    if never := seen.never_called:
        warn(
            f"capture: {len(never)} of {counted(len(chosen), 'layer')} never ran: {some(never)}.\n"
            "  possible causes: a container that is only iterated, a branch not taken, weights used without the module."
        )


class Captured(ByLayer[list[Tensor]]):
    """Captured outputs by layer name, one tensor for each call, with its gradient as `grad`."""

    def __repr__(self) -> str:
        lines = [f"{name!r}: {counted(len(calls), 'call')}, {describe(calls[-1])}" for name, calls in self.items()]
        return "\n".join(lines) or "<nothing captured>"

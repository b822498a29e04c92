"""What goes through a model's layers, as tensors."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hookdrop.errors import LayerError, ShapeError, nearest, warn
from hookdrop.hooks.checkpointing import running_again
from hookdrop.injection.select import Entries, Layer
from hookdrop.observe.read_only_hooks import chosen_layers, chosen_tensor, first_tensor, tapped
from hookdrop.utils.context import within
from hookdrop.utils.tables import counted, some
from hookdrop.utils.tensor_copies import NotKept, Place, copied, place
from hookdrop.utils.tensor_tree import TensorKey
from hookdrop.utils.validation import count


@within("with capture(model, layers) as seen: model(x)   then seen[name]")
def capture(
    model: nn.Module,
    layers: Entries,
    inputs: bool = False,
    gradients: bool = False,
    *,
    to: Place = None,
    last: int | None = None,
    tensor: TensorKey = None,
    exclude: Entries = (),
) -> Iterator[Captured]:
    """Keep what the forwards inside make of these layers.

    The tensors are copies without a graph, so that no in-place operation changes them, and stay when the block has
    ended; its hooks go, after an exception too. A layer's output is kept as the hooks leave it that were there before:
    behind a regularizer of `inject`, what it let through. What an activation checkpoint runs again is not kept twice,
    and compiled models run uncompiled inside.

    Args:
        model: any module, wrapped (DistributedDataParallel, torch.compile, ...) or not.
        layers: which: names, globs, classes, modules, ..., as `inject` takes them.
        inputs: keep the first tensor of each call's arguments too, as `captured.inputs`.
        gradients: keep the gradient of each call's output too, as `captured.gradients`: the sum over the backward
            passes inside, or None where none has reached it.
        to: the device of what is kept, such as `"cpu"`; None is where the tensors are.
        last: how many calls of each layer to keep; None is all.
        tensor: which tensor of a tuple, list or dict: an index or a key; None is the first floating-point one.
        exclude: layers to leave out.

    Yields:
        A read-only dict from layer names to lists of tensors, one for each call.

    Raises:
        LayerError: an entry matches no layer; or a layer is asked for that was not captured or never called.
        ShapeError: a layer gives no tensor.
        ValueError: there is no such device, or `last` is below 1.
        InjectionError: a forward inside runs under `torch.func`.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
        >>> with capture(model, "*", gradients=True) as seen:
        ...     model(torch.ones(2, 3)).sum().backward()
        >>> seen["0"][-1].shape, seen.gradients["1"][-1].sum()
        (torch.Size([2, 4]), tensor(8.))
    """
    if last is not None:
        last = count(last, "last", "capture")
    to = place(to, "capture")
    if tensor == "all":
        raise LayerError('capture keeps one tensor of a call: tensor= is an index, a key or None, not "all".')
    watched = [
        _Watched(layer, inputs, gradients, to, last, tensor)
        for layer in chosen_layers(model, layers, exclude, "capture()")
    ]
    before = [(one.module, one.enter) for one in watched if inputs]
    try:
        with tapped([(one.module, one.leave) for one in watched], before):
            yield Captured(watched, inputs, gradients)
    finally:
        for one in watched:
            one.let_go()
    _tell(watched, gradients)


class _Call:
    """What is kept of one call."""

    def __init__(self, output: Tensor, input: Tensor | None, to: Place) -> None:
        self.output, self.input, self._to = output, input, to
        self.gradient: Tensor | None = None
        self.handle: RemovableHandle | None = None

    def follow(self, x: Tensor) -> None:
        """Keep the gradient of `x`."""
        self.handle = x.register_hook(self._add)  # type: ignore[no-untyped-call]

    def _add(self, gradient: Tensor) -> None:
        new = copied(gradient, self._to)
        self.gradient = new if self.gradient is None else self.gradient + new

    def let_go(self) -> None:
        if self.handle is not None:
            self.handle.remove()


class _Watched:
    """One layer and its calls."""

    def __init__(
        self, layer: Layer, inputs: bool, gradients: bool, to: Place, last: int | None, tensor: TensorKey
    ) -> None:
        self.name, self.module = layer.name, layer.module
        self.names = {layer.name, *layer.aliases, *layer.spellings}
        self.calls: deque[_Call] = deque()
        self._inputs, self._gradients, self._to, self._last, self._tensor = inputs, gradients, to, last, tensor
        self._entered: dict[int, list[tuple[int, Tensor]]] = {}
        """By thread, the calls that have not ended and their inputs: several if the layer calls itself."""

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if running_again():
            return
        x = first_tensor((args, kwargs))
        if x is None:
            raise ShapeError(f"{self.name!r} was called without a tensor.\n  leave it out: exclude=...")
        entered = self._entered.setdefault(threading.get_ident(), [])
        if entered:
            running = _running()
            entered[:] = [one for one in entered if one[0] in running]  # the others have failed
        entered.append((_calling(), copied(x, self._to)))

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        x = chosen_tensor(output, self._tensor, repr(self.name))
        if running_again():
            self._follow_again(x)
            return
        call = _Call(copied(x, self._to), self._input_of(_calling()), self._to)
        if self._gradients and x.requires_grad:
            call.follow(x)
        if len(self.calls) == self._last:
            self.calls.popleft().let_go()
        self.calls.append(call)

    def _input_of(self, call: int) -> Tensor | None:
        """Above it lie those of calls inside that ended in an exception."""
        entered = self._entered.get(threading.get_ident(), [])
        while entered:
            one, x = entered.pop()
            if one == call:
                return x
        return None

    def _follow_again(self, x: Tensor) -> None:
        """A reentrant checkpoint has a graph only now: `x` is the output of the call that had the same values."""
        if self._gradients and x.requires_grad:
            again = (c for c in reversed(self.calls) if c.handle is None and _same(c.output, x))
            for call in again:
                call.follow(x)
                return

    def let_go(self) -> None:
        """Leave no hook on any tensor."""
        self._entered.clear()
        for call in self.calls:
            call.let_go()


def _calling() -> int:
    """The call of the layer that `enter` and `leave` are called from: PyTorch calls both from one frame."""
    return id(sys._getframe(3))  # behind this function, `enter` or `leave`, and `Tap`


def _running() -> set[int]:
    """All calls in which this one is, of whatever function."""
    frame, found = sys._getframe(2), set()
    while frame.f_back is not None:
        frame = frame.f_back
        found.add(id(frame))
    return found


def _same(kept: Tensor, x: Tensor) -> bool:
    return kept.shape == x.shape and torch.equal(kept, x.detach().to(kept.device))


class _View(Mapping[str, list[Any]]):
    """One part of the calls, by the layers' names."""

    def __init__(self, watched: list[_Watched], part: str) -> None:
        self._watched, self._part = watched, part

    def __getitem__(self, name: str) -> list[Any]:
        """One entry for each call of the layer.

        Raises:
            LayerError: the layer is not captured, or was not called.
        """
        found = next((one for one in self._watched if name in one.names), None)
        if found is None:
            known = [one.name for one in self._watched]
            near = nearest(name, known) or known
            raise NotKept(f"{name!r} is not captured.\n  captured: {some(near)}")
        if not found.calls:
            called = some(list(self)) or "none"
            raise NotKept(f"{name!r} was not called, so nothing of it was captured.\n  called: {called}")
        return [getattr(call, self._part) for call in found.calls]

    def __iter__(self) -> Iterator[str]:
        return (one.name for one in self._watched if one.calls)

    def __len__(self) -> int:
        return sum(bool(one.calls) for one in self._watched)

    def __repr__(self) -> str:
        lines = [f"{name!r}: {counted(len(self[name]), 'call')}, {_shape(self[name][-1])}" for name in self]
        return "\n".join(lines) or "<nothing captured>"


class Captured(_View):
    """Outputs by the layers' names: lists of tensors, one for each call; `inputs` and `gradients` are the same."""

    def __init__(self, watched: list[_Watched], inputs: bool, gradients: bool) -> None:
        super().__init__(watched, "output")
        self._asked = {"inputs": inputs, "gradients": gradients}

    @property
    def inputs(self) -> Mapping[str, list[Tensor]]:
        """The first tensor of each call's arguments, as it came in."""
        return self._view("inputs", "input")

    @property
    def gradients(self) -> Mapping[str, list[Tensor | None]]:
        """The gradient of each call's output; None where no backward pass reached it."""
        return self._view("gradients", "gradient")

    def _view(self, name: str, part: str) -> _View:
        if not self._asked[name]:
            raise NotKept(f"the {name} were not captured.\n  ask for them: capture(..., {name}=True)")
        return _View(self._watched, part)


def _shape(x: Tensor | None) -> str:
    return "no gradient" if x is None else f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"


def _tell(watched: list[_Watched], gradients: bool) -> None:
    never = [one.name for one in watched if not one.calls]
    if never:
        warn(
            f"{counted(len(never), 'layer')} of {len(watched)} never called while capturing: {some(never)}.\n"
            "  containers that are iterated, branches not taken, and modules whose weights alone are used have none."
        )
    calls = [call for one in watched for call in one.calls]
    if gradients and calls and all(call.gradient is None for call in calls):
        warn("no gradient was captured: call backward() inside the `with` block, and the forward with gradients on.")

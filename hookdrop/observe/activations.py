"""Capture the tensors that a model's layers compute."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hookdrop.hooks.checkpointing import is_recomputing
from hookdrop.observe.read_only_hooks import ByLayer, LayerObserver, chosen_layers, first_tensor, observed
from hookdrop.utils.captures import CopyDevice, NotRecordedError, detached_copy, requires_with, valid_device
from hookdrop.utils.errors import LayerError, ShapeError, warn
from hookdrop.utils.select import Entries, Layer
from hookdrop.utils.tables import counted, some
from hookdrop.utils.tensor_tree import TensorKey, describe, map_tensor
from hookdrop.utils.validation import count


@requires_with("with capture(model, layers) as seen: model(x)   then seen[name]")
def capture(
    model: nn.Module,
    layers: Entries,
    inputs: bool = False,
    gradients: bool = False,
    *,
    to: CopyDevice = None,
    last: int | None = None,
    tensor: TensorKey = None,
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
        inputs: also capture the first tensor among the arguments of each call, as `captured.inputs`.
        gradients: also capture the gradient of each call's output, as `captured.gradients`: the sum over the backward
            passes inside, or None if no backward pass reached it, as inside a reentrant checkpoint.
        to: device of the copies, such as `"cpu"`; None keeps the device of each tensor.
        last: number of most recent calls of each layer to keep; None keeps all.
        tensor: which tensor of a tuple, list or dict to capture: an index or a key; None is the first floating-point
            tensor.
        exclude: layers to skip.

    Yields:
        A read-only dict from layer names to lists of tensors, one for each call.

    Raises:
        LayerError: an entry matches no layer, or the requested layer was not captured or never called.
        ShapeError: a layer returns no tensor.
        ValueError: the device does not exist, or `last` is below 1.
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
    to = valid_device(to, "capture")
    if tensor == "all":
        raise LayerError('capture: tensor must be an index, a key or None, not "all": it keeps one tensor per call.')
    chosen = chosen_layers(model, layers, exclude, "capture()")
    recorders = [_Recorder(layer, gradients, to, last, tensor) for layer in chosen]
    before = [(recorder.module, recorder.before_forward) for recorder in recorders if inputs]
    with observed(recorders, before):
        yield Captured(recorders, inputs, gradients)
    never = [recorder.name for recorder in recorders if not recorder.calls]
    if never:
        warn(
            f"capture: {len(never)} of {counted(len(recorders), 'layer')} never ran: {some(never)}.\n"
            "  possible causes: a container that is only iterated, a branch not taken, weights used without the module."
        )
    calls = [call for recorder in recorders for call in recorder.calls]
    if gradients and calls and all(call.gradient is None for call in calls):
        warn("no gradient was captured: call backward() inside the `with` block, and run the forward with gradients.")


@dataclass(eq=False)
class _Call:
    """The captured tensors of one call."""

    output: Tensor
    input: Tensor | None
    gradient: Tensor | None = None


class _Recorder(LayerObserver):
    """The hooks of one layer, and its captured calls."""

    def __init__(self, layer: Layer, gradients: bool, to: CopyDevice, last: int | None, tensor: TensorKey) -> None:
        super().__init__(layer)
        self.calls: deque[_Call] = deque(maxlen=last)
        self._gradients, self._to, self._tensor = gradients, to, tensor
        self._inputs: dict[int, list[Tensor]] = {}
        """Inputs of the running calls by thread: several if the layer calls itself."""

    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if is_recomputing():
            return
        x = first_tensor((args, kwargs))
        if x is None:
            raise ShapeError(f"{self.name!r} was called without a tensor.\n  skip it: exclude=...")
        self._inputs.setdefault(threading.get_ident(), []).append(detached_copy(x, self._to))

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if is_recomputing():
            return
        inputs = self._inputs.get(threading.get_ident())
        input = inputs.pop() if inputs else None
        if output is None and sys.exc_info()[0] is not None:  # the forward raised
            return
        x = self._chosen(output)
        self.calls.append(call := _Call(detached_copy(x, self._to), input))

        def add(gradient: Tensor) -> None:
            new = detached_copy(gradient, self._to)
            call.gradient = new if call.gradient is None else call.gradient + new

        if self._gradients and x.requires_grad:
            self.on_gradient(x, add)

    def _chosen(self, output: Any) -> Tensor:
        if self._tensor is None:
            if (first := first_tensor(output)) is None:
                what = f"{self.name!r} returned {describe(output)}, which contains no tensor"
                raise ShapeError(f"{what}.\n  skip it: exclude=...")
            return first
        found: dict[int, Tensor] = {}
        try:
            map_tensor(output, self._tensor, lambda x: found.setdefault(0, x))
        except ShapeError as error:
            error.args = (f"{self.name!r} {error}",)
            raise
        return found[0]


class Captured(ByLayer[list[Any]]):
    """Captured outputs by layer name, one tensor for each call. `inputs` and `gradients` have the same form."""

    def __init__(self, recorders: Sequence[_Recorder], inputs: bool, gradients: bool, shown: str = "output") -> None:
        super().__init__(recorders, lambda recorder: [getattr(call, shown) for call in recorder.calls])
        self._requested = inputs, gradients

    @property
    def inputs(self) -> Captured:
        """The first tensor among the arguments of each call, as it was before the call."""
        return self._view("inputs", "input", self._requested[0])

    @property
    def gradients(self) -> Captured:
        """The gradient of each call's output; None where no backward pass reached it."""
        return self._view("gradients", "gradient", self._requested[1])

    def _view(self, name: str, shown: str, requested: bool) -> Captured:
        if not requested:
            raise NotRecordedError(f"the {name} were not captured.\n  write: capture(..., {name}=True)")
        return Captured(self._observers, *self._requested, shown)

    def __repr__(self) -> str:
        lines = [
            f"{name!r}: {counted(len(calls), 'call')}, {'no gradient' if calls[-1] is None else describe(calls[-1])}"
            for name, calls in self.items()
        ]
        return "\n".join(lines) or "<nothing captured>"

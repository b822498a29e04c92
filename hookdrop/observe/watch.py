"""Watch layers of a model with hooks that are gone after the `with` block."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from typing import Any, Generic, Self, TypeVar

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hookdrop.hooks import compiling
from hookdrop.hooks.checkpointing import is_recomputing
from hookdrop.survey.isolation import uncompiled
from hookdrop.utils.errors import NotRecordedError, ShapeError, did_you_mean, warn
from hookdrop.utils.names import unwrapped
from hookdrop.utils.select import Entries, hookable, select
from hookdrop.utils.tables import some
from hookdrop.utils.tensor_tree import TensorKey, bind_arguments, fits, leaves, map_tensor

Value = TypeVar("Value")
Tensors = tuple[Tensor, ...]
Receiver = Callable[[int, Tensor], None]
"""Receives the index of a tensor in an output, and its gradient."""


class Watch(Mapping[str, Value], Generic[Value]):
    """Maps the names of the layers that ran inside the `with` block to what was seen there.

    A hook sees the tensor after all hooks that were on the layer before. What an activation checkpoint recomputes is
    not seen again. Compiled code runs uncompiled inside.
    """

    every = 1
    """How many forwards of the model there are for each one that is looked at."""

    def __init__(self, model: nn.Module, layers: Entries, exclude: Entries | None, tensor: TensorKey) -> None:
        compiling.raise_if_tracing("observe")
        self.model, self.tensor = unwrapped(model), tensor
        self.layers = {layer.name: layer.module for layer in hookable(select(model, layers, exclude))[0]}
        self.seen: dict[str, Any] = {}
        self._calls = dict.fromkeys(self.layers, 0)
        self._forwards = self.now = 0  # of the whole model, and the one in progress
        self._hooks, self._keys = ExitStack(), itertools.count()
        self._pending: dict[int, RemovableHandle] = {}  # hooks on tensors whose gradient has not arrived

    def before(self, name: str, found: Tensors) -> None:
        """Receive the input of a layer."""

    def after(self, name: str, found: Tensors) -> None:
        """Receive the output of a layer."""

    def receiver(self, name: str) -> Receiver | None:
        """Return what to call with the gradient of the output that a layer has just returned."""

    def value(self, name: str) -> Value:
        raise NotImplementedError

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(uncompiled())
            stack.callback(self.model.register_forward_pre_hook(_Hook(self._count)).remove)
            for name, module in self.layers.items():
                if type(self).before is not Watch.before:
                    before = _Hook(self._before, name)
                    stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(_Hook(self._after, name)).remove)
            self._hooks = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.close()
        for handle in self._pending.values():
            handle.remove()
        self._pending.clear()
        if not self.seen and error[0] is None:
            warn(f"observe: none of the layers ran inside the `with` block: {some([*self.layers])}.")

    def __getitem__(self, name: str) -> Value:
        if name in self.seen:
            return self.value(name)
        why = "it returned no floating-point tensor" if self._calls.get(name) else "it did not run in the `with` block"
        why = why if name in self.layers else f"it was not watched{did_you_mean(name, self.layers)}"
        raise NotRecordedError(f"nothing is known of {name!r}: {why}\n  seen: {some(list(self)) or 'nothing'}")

    def __iter__(self) -> Iterator[str]:
        return iter(self.seen)

    def __len__(self) -> int:
        return len(self.seen)

    def never(self, *, with_parameters: bool = False) -> str:
        """Return the layers that did not run as a sentence; empty if there are none."""
        absent = [name for name, calls in self._calls.items() if not calls]
        if with_parameters:
            absent = [name for name in absent if any(True for _ in self.layers[name].parameters())]
        return f"never ran: {some(absent)}" if absent else ""

    def _count(self, *call: Any) -> None:
        if not is_recomputing():
            self._forwards += 1
            # Not every output has a backward pass.
            pending = self._pending.items()
            self._pending = {key: handle for key, handle in pending if handle.hooks_dict_ref() is not None}

    def _before(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_sampled(name) and not is_recomputing():
            self.before(name, self.chosen(name, bind_arguments(module, args, kwargs)))

    def _after(self, name: str, module: nn.Module, args: Any, output: Any) -> Any:
        sampled, recomputes = self._is_sampled(name), is_recomputing()
        self._calls[name] += not recomputes
        if not sampled or not (found := self.chosen(name, output)):
            return
        if not recomputes:
            self.after(name, found)
        # A reentrant checkpoint has gradients only in what it recomputes, any other only in the first forward.
        receive = self.receiver(name) if name in self.seen else None
        for index, x in enumerate(found if receive else ()):
            if x.requires_grad:
                self._await_gradient(x, index, receive)

    def _is_sampled(self, name: str) -> bool:
        # Of a model whose own forward never runs, such as a LightningModule, each layer counts its calls.
        self.now = self._forwards or self._calls[name] + 1
        return (self.now - 1) % self.every == 0

    def _await_gradient(self, x: Any, index: int, receive: Any) -> None:
        def arrived(gradient: Tensor) -> None:
            self._pending.pop(key).remove()  # a second backward pass does not count
            receive(index, gradient)

        key = next(self._keys)
        self._pending[key] = x.register_hook(arrived)

    def chosen(self, name: str, value: Any) -> Tensors:
        """Return the tensors of a layer: none if it has none, or only those of a survey, which have no values."""
        found: list[Tensor] = []
        try:
            if self.tensor is None:
                found = [leaf for _, leaf in leaves(value) if fits(leaf)][:1]
            else:
                map_tensor(value, self.tensor, lambda x: found.append(x) or x)  # type: ignore[func-returns-value]
        except ShapeError as error:
            error.args = (f"observe at {name!r}: {error}",)
            raise
        return () if any(type(x).__name__ == "FakeTensor" for x in found) else tuple(found)


class _Hook:
    """A hook that copies and pickles of a model leave out."""

    def __init__(self, method: Callable[..., Any], *name: str) -> None:
        self.method, self.name = method, name

    def __call__(self, *call: Any) -> Any:
        return _SEE.call(self.method, *self.name, *call)

    def __reduce__(self) -> Any:
        return nullcontext().__exit__.__reduce__()


_SEE = compiling.GraphBreak(lambda method, *call: method(*call), "hookdrop.observe looks at the values of tensors.")

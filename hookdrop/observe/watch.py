"""Watch layers of a model with hooks that are gone after the `with` block."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hookdrop.core import compiling
from hookdrop.core.errors import InjectionError, NotRecordedError, ShapeError, did_you_mean, warn
from hookdrop.core.selection import Entries, hookable, select, unwrapped
from hookdrop.core.tables import some
from hookdrop.core.tensor_tree import TensorKey, bind_arguments, fits, leaves, map_tensor
from hookdrop.core.torch_internals import graph_task, vmap_randomness
from hookdrop.survey.isolation import uncompiled

Value = TypeVar("Value")
Tensors = tuple[Tensor, ...]
Receiver = Callable[[int, Tensor], None]
"""Receives the index of a tensor in an output, and its gradient."""


class Watch(Mapping[str, Value], Generic[Value]):
    """Maps the names of the layers that ran inside the `with` block to what was seen there.

    A hook sees the tensor after all hooks that were on the layer before. What an activation checkpoint recomputes is
    not seen again. Compiled code runs uncompiled inside.
    """

    every = 1  #: How many forwards of the model there are for each one that is looked at.
    selects_input = False  #: Whether `tensor` selects from the inputs, and not from the outputs.

    def __init__(self, model: nn.Module, layers: Entries, exclude: Entries | None, tensor: TensorKey) -> None:
        compiling.raise_if_tracing("observe")
        self.model, self.tensor = unwrapped(model), tensor
        self.layers = {layer.name: layer.module for layer in hookable(select(model, layers, exclude))[0]}
        self.seen: dict[str, Any] = {}
        self._forwards: Counter[bool] = Counter()  # of the whole model, in eval and in training mode
        self._calls: Counter[tuple[str, bool]] = Counter()
        self._hooks: ExitStack | None = None
        self._keys, self._pending = itertools.count(), dict[int, RemovableHandle]()  # of gradients to come

    def before(self, name: str, found: Tensors) -> None:
        """Receive the input of a layer."""

    @abstractmethod
    def after(self, name: str, found: Tensors) -> Receiver | None:
        """Receive the output of a layer, and return what to call with its gradient."""

    @abstractmethod
    def value(self, name: str) -> Value:
        """Return what was seen of a layer."""

    def __enter__(self) -> Self:
        if self._hooks is not None:
            raise InjectionError("this block is open already.\n  create another one for a block inside it")
        with ExitStack() as stack:
            stack.enter_context(uncompiled())
            stack.callback(self.model.register_forward_pre_hook(_Hook(self._count)).remove)
            for name, module in self.layers.items():
                if type(self).before is not Watch.before:
                    before = _Hook(self._before, name)
                    stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(_Hook(self._after, name)).remove)
            stack.callback(self._forget_gradients)
            self._hooks = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._hooks is not None:
            self._hooks.close()
        self._hooks = None
        if not self._calls and error[0] is None:
            warn(f"observe: none of the layers ran inside the `with` block: {some([*self.layers])}.")

    def __getitem__(self, name: str) -> Value:
        if name in self.seen:
            return self.value(name)
        why = "it did not run inside the `with` block, or only in forwards that are not measured"
        why = why if name in self.layers else f"it was not watched{did_you_mean(name, self.layers)}"
        raise NotRecordedError(f"nothing is known of {name!r}: {why}\n  seen: {some(list(self)) or 'nothing'}")

    def __iter__(self) -> Iterator[str]:
        return iter(self.seen)

    def __len__(self) -> int:
        return len(self.seen)

    def never(self, *, with_parameters: bool = False) -> str:
        """Return the layers that did not run as a sentence; empty if there are none."""
        ran = {name for name, _ in self._calls}
        absent = [name for name in self.layers if name not in ran]
        if with_parameters:
            absent = [name for name in absent if any(True for _ in self.layers[name].parameters())]
        return f"never ran: {some(absent)}" if absent else ""

    def _count(self, module: nn.Module, args: Any) -> None:
        if graph_task() == -1:
            self._forwards[module.training] += 1

    def _is_sampled(self, name: str, module: nn.Module) -> bool:
        # Of a model whose own forward does not train, such as a LightningModule, each layer counts its calls.
        forwards = self._forwards[self.model.training]
        return ((forwards or self._calls[name, module.training] + 1) - 1) % self.every == 0

    def _before(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if graph_task() == -1 and self._is_sampled(name, module):
            bound = bind_arguments(module, args, kwargs)
            self.before(name, self.chosen(name, bound, self.tensor if self.selects_input else None) or ())

    def _after(self, name: str, module: nn.Module, args: Any, output: Any) -> Any:
        if graph_task() != -1:
            return
        sampled = self._is_sampled(name, module)
        self._calls[name, module.training] += 1
        found = self.chosen(name, output, None if self.selects_input else self.tensor) if sampled else None
        receive = None if found is None else self.after(name, found)
        for index, x in enumerate(found or ()):
            if receive is not None and x.requires_grad:
                self._await_gradient(x, index, receive)

    def _await_gradient(self, x: Any, index: int, receive: Receiver) -> None:
        def arrived(gradient: Tensor) -> None:
            self._pending.pop(key).remove()  # a second backward pass does not count
            receive(index, gradient)

        key = next(self._keys)
        self._pending[key] = x.register_hook(arrived)
        if key % 1024 == 0:  # not every output has a backward pass
            pending = self._pending.items()
            self._pending = {key: handle for key, handle in pending if handle.hooks_dict_ref() is not None}

    def _forget_gradients(self) -> None:
        for handle in self._pending.values():
            handle.remove()
        self._pending.clear()

    def chosen(self, name: str, value: Any, tensor: TensorKey) -> Tensors | None:
        """Return the dense tensors of a layer; None if they have no values, as in a survey or inside `vmap`."""
        found: list[Tensor] = []

        def note(x: Tensor) -> Tensor:
            found.append(x)
            return x

        try:
            if tensor is None:
                found = [leaf for _, leaf in leaves(value) if fits(leaf) and _is_dense(leaf)][:1]
            else:
                map_tensor(value, tensor, note)
        except ShapeError as error:
            error.args = (f"observe at {name!r}: {error}",)
            raise
        if vmap_randomness() or any(type(x).__name__ == "FakeTensor" for x in found):
            return None
        return tuple(filter(_is_dense, found))


def _is_dense(x: Tensor) -> bool:
    return not x.is_nested and x.layout is torch.strided


class _Hook:
    """A hook that copies and pickles of a model leave out."""

    def __init__(self, method: Callable[..., Any], *name: str) -> None:
        self.method, self.name = method, name

    def __call__(self, *call: Any) -> Any:
        return _SEE.call(self.method, *self.name, *call)

    def __reduce__(self) -> Any:
        return nullcontext().__exit__.__reduce__()


_SEE = compiling.GraphBreak(lambda method, *call: method(*call), "hookdrop.observe looks at the values of tensors.")

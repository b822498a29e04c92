"""Record a `Trace`: run a model once, and see the functions of PyTorch that it calls, and the operations of other code.

The fused kernels of `nn.TransformerEncoderLayer` and `nn.MultiheadAttention` are switched off, because they hide the
additions inside them. Of code that functions of torch do not show, as `torch.jit` compiled it, the operations are those
of the dispatcher. A module whose output comes from elsewhere, such as another library, is one, named "opaque".
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from hookdrop.core.errors import InjectionError
from hookdrop.core.selection import named_layers, unwrapped
from hookdrop.core.tensor_tree import bind_arguments, leaves, map_leaves, map_tensors, tensors
from hookdrop.core.torch_internals import (
    dispatch_modes,
    fake_tensors,
    storage_of,
    version_of,
    without_dispatch_mode,
    without_function_modes,
)
from hookdrop.survey.isolation import Training, call, hooked, other_hooks, restored_after, restored_objects, set_modes
from hookdrop.survey.ops import FUSED_ATTENTION
from hookdrop.survey.trace import Call, Node, Op, Trace, nodes_in


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a model by the names that they have in a trace, without wrappers such as compiled code."""
    return {layer.name: layer.module for layer in named_layers(model)}


def record(model: nn.Module, example: Any, *, fake: bool = True, training: Training = False) -> Trace:
    """Run `model` once on `example` without gradients, restore its state, and return what it did.

    Args:
        model: the model, possibly inside wrappers.
        example: a tensor, a tuple of arguments, or a mapping of keyword arguments.
        fake: whether the tensors have no values, only shapes: this costs no memory and no arithmetic.
        training: whether to run in training mode instead of eval mode, or which modules do; batch norms never do.

    Raises:
        InjectionError: the model does not accept the example, or it or a hook of other code needs values.
    """
    # Such a hook could keep a tensor without values, or read one. Leaving it out would be wrong if it changes outputs,
    # loads weights or moves tensors, which cannot be known. So it gets values, at the cost of forwards that compute.
    # The hooks of PyTorch, which compute or gather weights, work without values.
    if fake and other_hooks(model):
        raise InjectionError("the model has hooks of other code, which might need values.")
    try:
        return _record(model, example, fake, training)
    except InjectionError:
        if fake:
            raise
        # A dispatch mode keeps some code from running; a function that `torch.jit` has traced, only the first time.
        found = _record(model, example, fake, training, sees_hidden=False)
        with suppress(InjectionError):
            found = _record(model, example, fake, training)
        return found


def _record(model: nn.Module, example: Any, fake: bool, training: Training, sees_hidden: bool = True) -> Trace:
    with ExitStack() as stack:
        stack.enter_context(restored_after(model, trains=bool(training)))
        torch.default_generator.manual_seed(0)  # `plan` and `inject` agree on a model that draws in eval mode
        recorder = _Recorder(model)
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        stack.enter_context(torch.no_grad())
        set_modes(model, training)
        if fake:
            recorder.fake_mode = stack.enter_context(fake_tensors())
            example = map_tensors(example, recorder.fake_mode.from_tensor)
        stored, given = stack.enter_context(restored_objects(model, example)), _places(example)
        recorder.trace.inputs = [recorder.new(tensor, leaf="input") for tensor in tensors(example)]
        stack.enter_context(hooked(model, recorder.enter, recorder.leave))
        if sees_hidden:
            stack.enter_context(recorder.hidden)
            recorder.modes = dispatch_modes()
        stack.enter_context(recorder)
        recorder.trace.outputs = nodes_in(recorder.plain(call(unwrapped(model), example)))
        recorder.trace.stored = nodes_in(recorder.plain(stored()))
        recorder.trace.changes_arguments = _places(example) != given
    return recorder.trace


def _places(value: Any) -> list[Any]:
    return [(path, id(leaf)) for path, leaf in leaves(value)]


def _unseen(*args: Any) -> Any:
    raise NotImplementedError("code that PyTorch does not see computes a part of it")


class _Hidden(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the operations of code that a `TorchFunctionMode` does not see."""

    def __init__(self, recorded: Callable[..., Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorded = recorded

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.recorded(function, args, kwargs or {}, is_hidden=True)


class _Recorder(TorchFunctionMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.trace = Trace()
        self.clock = itertools.count()
        self.nodes = WeakTensorKeyDictionary()
        self.writes: dict[int, Node] = {}
        """The last in-place change of each storage."""
        self.versions: dict[Node, int] = {}
        self.allocated: Any = WeakTensorKeyDictionary()
        """The memory that hidden code reserves, which code outside of PyTorch may fill."""
        self.stack: list[Call] = []
        self.fake_mode: Any = None
        self.hidden = _Hidden(self.recorded)
        self.modes = 0
        layers = list(named_layers(model))
        known = {layer.name for layer in layers}  # a shared module has its first name
        for layer in layers:
            shapes = tuple(tuple(p.shape) for p in layer.module.parameters(recurse=False))
            self.trace.modules[layer.name] = type(layer.module).__name__, shapes
            if isinstance(layer.module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
                names = (f"{layer.name}.{child}".lstrip(".") for child in layer.module._modules)
                self.trace.lists[layer.name] = [name for name in names if name in known]
        for tensor in (*model.parameters(), *model.buffers()):
            self.new(tensor, leaf="weight").has_weights = isinstance(tensor, nn.Parameter)
        for layer in layers:
            # A pre-hook may compute a weight from a parameter before the recorder sees the call.
            if not layer.module._forward_pre_hooks:
                for name, x in layer.module.named_parameters(layer.name, recurse=False, remove_duplicate=False):
                    self.nodes[x].names.append(name)

    def enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        arguments, parent = self.plain(bind_arguments(module, args, kwargs)), self.stack[-1] if self.stack else None
        self.stack.append(Call(next(self.clock), name, type(module).__name__, parent, arguments))
        self.trace.calls.append(self.stack[-1])

    def leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        left = self.stack.pop()
        unseen = [tensor for tensor in tensors(output) if tensor not in self.nodes]
        if unseen:  # the module calls code of another library
            op = self._op("opaque", _unseen, tuple(left.inputs), {}, tuple(left.inputs))
            for tensor in unseen:
                self.new(tensor, op).has_weights |= any(True for _ in module.parameters())
        left.output = self.plain(output)
        left.end = next(self.clock)

    def plain(self, value: Any) -> Any:
        """Replace tensors by nodes, and objects, such as caches, by None: a trace keeps nothing alive."""

        def plain(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return self._node(leaf)
            return leaf if isinstance(leaf, bool | int | float | str | torch.dtype) else None

        return map_leaves(value, plain)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if dispatch_modes() < self.modes:  # inside an operation that hidden code has called
            return function(*args, **kwargs or {})
        with without_dispatch_mode() if dispatch_modes() == self.modes > 0 else nullcontext():
            return self.recorded(function, args, kwargs or {})

    def recorded(self, function: Any, args: Any, kwargs: Any, is_hidden: bool = False) -> Any:
        """Call a function, and add it to the operations if it computes a tensor."""
        given: dict[int, Tensor] = {}
        # The dispatcher counts a change only later.
        target = args[0] if is_hidden and function.__name__.partition(".")[0].endswith("_") else kwargs.get("out")
        if isinstance(target, Tensor):
            self.allocated.pop(target, None)
        plain_args, plain_kwargs = map_tensors((args, kwargs), lambda x: self._node(given.setdefault(id(x), x)))
        inputs = [self.nodes[tensor] for tensor in given.values()]
        if self.fake_mode is not None and any(map(self.fake_mode.is_our_fake, given.values())):
            # PyTorch caches the shapes that it computes for fake tensors alone, so that equal blocks cost those of one.
            fake, plain = self.fake_mode.from_tensor, (Tensor, nn.Parameter)
            args, kwargs = map_tensors((args, kwargs), lambda x: fake(x) if type(x) in plain else x)
        result = function(*args, **kwargs)
        pairs = zip(given.values(), inputs, strict=True)
        changed = [x for x, node in pairs if x is target or _version(x) != self.versions[node]]
        outputs = {id(x): x for x in (*(x for x in tensors(result) if x not in self.nodes), *changed)}
        if re.search("^new_|_like$|_as$", name := _name(function)):
            inputs = inputs[:1] if name.endswith("_as") else []
        if is_hidden and "empty" in name:
            self.allocated.update(dict.fromkeys(outputs.values()))
        elif outputs:
            op = self._op(name, function, plain_args, plain_kwargs, tuple(inputs))
            op.is_in_place, op.is_hidden = bool(changed), is_hidden
            for tensor in outputs.values():
                self.new(tensor, op)
            for tensor in changed:
                self.writes[storage_of(tensor)] = self.nodes[tensor]
        return result

    def _op(self, name: str, function: Any, args: Any, kwargs: Any, inputs: tuple[Node, ...]) -> Op:
        op = Op(next(self.clock), name, function, args, kwargs, inputs, self.stack[-1] if self.stack else None)
        running = {call.name for call in self.stack}
        for node in inputs:
            if running.isdisjoint([name.rpartition(".")[0] for name in node.names]):
                user = repr(op.call.name) if op.call and op.call.name else "the model itself"
                self.trace.elsewhere |= dict.fromkeys(node.names, user)
        self.trace.ops.append(op)
        return op

    def new(self, tensor: Tensor, op: Op | None = None, leaf: str = "") -> Node:
        """Return a node for the present value of a tensor, which an operation computed, or which is a leaf."""
        self.nodes[tensor] = node = Node(next(self.clock), tensor, op, leaf)
        self.versions[node] = _version(tensor)
        if op is not None:
            op.outputs.append(node)
        return node

    def _node(self, tensor: Tensor) -> Node:
        if tensor not in self.nodes:
            unread = self._unread() if tensor in self.allocated else ()
            if not unread:
                return self.new(tensor, leaf="constant")
            return self.new(tensor, self._op("opaque", _unseen, unread, {}, unread))
        node: Node = self.nodes[tensor]
        if self.versions[node] != _version(tensor):  # changed through another tensor that shares its memory
            inputs = tuple(dict.fromkeys((node, self.writes.get(storage_of(tensor), node))))
            node = self.new(tensor, self._op("alias", _unseen, inputs, {}, inputs))
        return node

    def _unread(self) -> tuple[Node, ...]:
        """Return the tensors of the running module that no operation has read yet: those that hidden code gets."""
        call = self.stack[-1] if self.stack else None
        ops = [op for op in self.trace.ops if call is None or op.index > call.start]
        made = [*(call.inputs if call else self.trace.inputs), *(node for op in ops for node in op.outputs)]
        read = {node for op in ops for node in op.inputs}
        return tuple(node for node in dict.fromkeys(made) if node.is_data and node not in read)


def _name(function: Any) -> str:
    """Return the name of a function, the same one for methods, operators and in-place forms."""
    name = getattr(function, "__name__", str(function))
    if name == "__get__":  # a property such as `x.T`
        name = getattr(function.__self__, "__name__", name)
    name = name.partition(".")[0]  # of an overload such as torch.ops.aten.add.Tensor
    if name.startswith("_scaled_dot_product"):  # a kernel of it
        return FUSED_ATTENTION
    special = re.fullmatch("__[ir]?(add|mul|matmul)__|__i?true(div)__|(mul)tiply|true_(div)ide", name)
    return next(filter(None, special.groups())) if special else name.strip("_")


def _version(tensor: Tensor) -> int:
    with without_function_modes():  # there are several reads for each operation
        return 0 if tensor.is_inference() else version_of(tensor)

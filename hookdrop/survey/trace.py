"""Record one forward of a model: its tensors, the operations between them, and the calls of its modules.

A `Trace` is plain data, without references to the model or its tensors. Analyses are functions of a trace:

    trace = record(model, example)
    for op in trace.ops:                          # in the order of execution
        op.name, op.inputs, op.outputs, op.call
    for call in trace.calls:                      # in the order in which the modules were entered
        call.name, call.arguments, call.output

A `Node` is one value of a tensor: an in-place operation gives the tensor a new node. Everything is numbered by one
clock, so the operations of a call are those with `call.start < op.index < call.end`, and a node was made before another
if its index is smaller.

The fused kernels of `nn.TransformerEncoderLayer` and `nn.MultiheadAttention` are switched off, because they hide the
additions inside them. Of code that functions of torch do not show, as `torch.jit` compiled it, the operations are those
of the dispatcher. A module whose output comes from elsewhere, such as another library, is one, named "opaque".
"""

from __future__ import annotations

import functools
import itertools
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from hookdrop.core.errors import InjectionError
from hookdrop.core.selection import named_layers, unwrapped
from hookdrop.core.tensor_tree import (
    TensorKey,
    bind_arguments,
    leaves,
    leaves_of,
    map_leaves,
    map_tensor,
    map_tensors,
    tensors,
)
from hookdrop.core.torch_internals import (
    dispatch_modes,
    fake_tensors,
    storage_of,
    version_of,
    without_dispatch_mode,
)
from hookdrop.survey.isolation import Training, call, hooked, other_hooks, restored_after, restored_objects, set_modes


class Node:
    """One value of a tensor.

    Attributes:
        index: the time of its computation.
        shape, dtype: those of the tensor.
        op: the operation that computed it; None for a leaf.
        leaf: `"input"`, `"weight"` (a parameter or a buffer) or `"constant"`; empty if an operation computed it.
        names: the full names of a parameter: several if modules share it.
        is_data: whether it depends on the example, unlike weights, masks and positions.
        has_weights: whether it depends on parameters.
    """

    # Not a dataclass: those are containers for the functions that find tensors in values.
    is_data: bool
    has_weights: bool

    def __init__(self, index: int, tensor: Tensor, op: Op | None = None, leaf: str = "") -> None:
        self.index, self.shape, self.dtype, self.op, self.leaf = index, tuple(tensor.shape), tensor.dtype, op, leaf
        self.names: list[str] = []
        self.is_data = leaf == "input" or (op is not None and any(node.is_data for node in op.inputs))
        self.has_weights = op is not None and any(node.has_weights for node in op.inputs)

    @property
    def fits(self) -> bool:
        """Whether it can be regularized: a floating-point tensor with at least one dimension."""
        return self.dtype.is_floating_point and len(self.shape) > 0

    @property
    def size(self) -> int:
        """The number of elements."""
        return torch.Size(self.shape).numel()

    def without_values(self) -> Tensor:
        """Return a tensor of this shape and type on the meta device."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


@dataclass(eq=False)
class Op:
    """One call of a function of torch."""

    index: int
    name: str
    """The name of the function, such as "linear" or "getitem"; "add" for all forms of an addition, as of a product."""
    function: Callable[..., Any] = field(repr=False)
    args: tuple[Any, ...] = field(repr=False)
    kwargs: dict[str, Any] = field(repr=False)
    """The arguments, with nodes in place of tensors."""
    inputs: tuple[Node, ...]
    """The tensors whose values it reads: not those that `zeros_like` and `expand_as` take a shape from."""
    call: Call | None = field(repr=False)
    """The innermost running module."""
    outputs: list[Node] = field(default_factory=list)
    is_in_place: bool = False
    """Whether it changes its first input."""
    is_hidden: bool = False
    """Whether functions of torch do not show it, so that no hook can change its arguments."""

    def argument(self, index: int, name: str, default: Any = None) -> Any:
        """Return an argument of the function by its position or its name."""
        return self.args[index] if len(self.args) > index else self.kwargs.get(name, default)


@dataclass(eq=False)
class Call:
    """One call of a module."""

    start: int
    name: str
    """The full name of the module; `""` is the model itself."""
    type: str
    parent: Call | None = field(repr=False)
    """The call of the module around it in the forward, which need not be the one around it in the model."""
    arguments: dict[str, Any] = field(repr=False)
    """The arguments by name; here and in `output`, nodes are in place of tensors."""
    output: Any = field(default=None, repr=False)
    end: int = 0

    @cached_property
    def inputs(self) -> list[Node]:
        """The nodes in the arguments, in the order of the signature."""
        return nodes_in(self.arguments)

    @cached_property
    def outputs(self) -> list[Node]:
        """The nodes in the output."""
        return nodes_in(self.output)

    def around(self) -> Iterator[Call]:
        """Yield this call and those around it, innermost first."""
        found: Call | None = self
        while found is not None:
            yield found
            found = found.parent


@dataclass(eq=False)
class Trace:
    """What one forward did."""

    ops: list[Op] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    """Of the modules that hooks see: not those of a class that overrides `__call__`."""
    inputs: list[Node] = field(default_factory=list)
    """The tensors of the example."""
    outputs: list[Node] = field(default_factory=list)
    """The tensors that the model returns."""
    stored: list[Node] = field(default_factory=list)
    """The tensors that it leaves elsewhere: in attributes, in other objects, and in containers that it gets."""
    changes_arguments: bool = False
    """Whether it changes what is in such containers."""
    modules: dict[str, tuple[str, tuple[tuple[int, ...], ...]]] = field(default_factory=dict)
    """By full name, the class of each module and the shapes of the parameters that it holds itself."""
    elsewhere: dict[str, str] = field(default_factory=dict)
    """The parameters that are used outside of all calls of modules that own them, and where."""
    lists: dict[str, list[str]] = field(default_factory=dict)
    """The modules in each `ModuleList`, `ModuleDict` and `Sequential`, by full name."""

    def type_of(self, name: str) -> str:
        """Return the class of a module; empty if there is none."""
        return self.modules[name][0] if name in self.modules else ""

    @cached_property
    def kinds(self) -> dict[str, tuple[str, frozenset[object]]]:
        """The class of each module, and the parts with parameters: what modules of one kind have in common.

        A part is a tuple: its name inside the module, its class, and the shapes of its own parameters.
        """
        parts: dict[str, set[object]] = {name: set() for name in self.modules}
        for name, (kind, shapes) in reversed(self.modules.items()):
            if shapes or parts[name]:
                around = [name[:end] for end, letter in enumerate(f"{name}.") if letter == "."] if name else []
                for outer in ["", *around]:
                    parts[outer].add((name.removeprefix(outer), kind, shapes))
        return {name: (self.type_of(name), frozenset(found)) for name, found in parts.items()}

    def repeated(self, names: Iterable[str]) -> set[str]:
        """Return the modules with these names or around them that have a sibling of their kind among them.

        One of both may have further parts, as the first layer often has.
        """
        groups: dict[tuple[str, str], dict[str, frozenset[object]]] = {}
        for name in names:
            while name:
                parent, (kind, parts) = name.rpartition(".")[0], self.kinds[name]
                groups.setdefault((parent, kind), {})[name] = parts
                name = parent
        return {
            name
            for group in groups.values()
            for name, parts in group.items()
            if any(parts <= other or parts >= other for one, other in group.items() if one != name)
        }

    @cached_property
    def calls_of(self) -> dict[str, list[Call]]:
        """The calls of each module by its full name."""
        found: dict[str, list[Call]] = {}
        for one in self.calls:
            found.setdefault(one.name, []).append(one)
        return found

    @cached_property
    def users(self) -> dict[Node, list[Op]]:
        """The operations that read each node."""
        found: dict[Node, list[Op]] = {}
        for op in self.ops:
            for node in dict.fromkeys(op.inputs):
                found.setdefault(node, []).append(op)
        return found

    @cached_property
    def ancestors(self) -> dict[Node, int]:
        """The nodes from which each node was computed, itself included, as a number: a bit for the index of each."""
        found: dict[Node, int] = {}
        for op in self.ops:
            before = functools.reduce(operator.or_, (found.get(node, 1 << node.index) for node in op.inputs), 0)
            found |= {node: before | 1 << node.index for node in op.outputs}
        return found

    def leads(self, first: Node, second: Node) -> bool:
        """Whether the second tensor is computed from the first."""
        return first is not second and bool(self.ancestors.get(second, 0) >> first.index & 1)

    def path(
        self, start: Node, ends: Iterable[Node], inputs: Callable[[Op], Iterable[Node]] = operator.attrgetter("inputs")
    ) -> list[Node]:
        """Return what is computed from `start` on the way to `ends`, in the order of execution.

        `inputs` gives the inputs of an operation that are followed; by default, all.
        """
        found = upstream(ends, lambda op: [node for node in inputs(op) if self.leads(start, node)])
        return sorted((node for node in found if self.leads(start, node)), key=lambda node: node.index)

    def reached(self, starts: Iterable[Node], gate: Node | None = None) -> set[Node]:
        """Return these nodes and all that is computed from them, not only through `gate`."""
        found = {*starts}
        for op in self.ops:
            if not found.isdisjoint(op.inputs):
                found.update(node for node in op.outputs if node is not gate)
        return found


def upstream(ends: Iterable[Node], inputs: Callable[[Op], Iterable[Node]]) -> dict[Node, None]:
    """Return these nodes and those on the way to them: `inputs` gives the inputs of an operation that are followed."""
    found, waiting = dict[Node, None](), [*ends]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found[node] = None
            waiting += inputs(node.op) if node.op else ()
    return found


def nodes_in(value: Any) -> list[Node]:
    """Return the nodes in a value, depth first."""
    return [leaf for leaf in leaves_of(value) if isinstance(leaf, Node)]


def select_nodes(value: Any, which: TensorKey) -> list[Node]:
    """Return the nodes in a value that `tensor` of `inject` selects, or raise `ShapeError` if there is none."""
    shown, chosen = {node: node.without_values() for node in nodes_in(value)}, list[int]()

    def look(x: Tensor) -> Tensor:
        chosen.append(id(x))
        return x

    map_tensor(map_leaves(value, lambda leaf: shown[leaf] if isinstance(leaf, Node) else leaf), which, look)
    return [node for node, x in shown.items() if id(x) in chosen]


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
    raise NotImplementedError("no function of torch shows what computes a part of it")


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
        if unseen:  # the module is compiled by torch.jit, or calls code of another library
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
        with without_dispatch_mode() if dispatch_modes() == self.modes else nullcontext():
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
        node = Node(next(self.clock), tensor, op, leaf)
        self.allocated.pop(tensor, None)
        # Before the tensor gets the node, because an active mode sees that its version is read, and calls `_node`.
        self.versions[node] = _version(tensor)
        self.nodes[tensor] = node
        if op is not None:
            op.outputs.append(node)
        return node

    def _node(self, tensor: Tensor) -> Node:
        if tensor not in self.nodes:
            unread = self._unread() if tensor in self.allocated else ()
            return self.new(tensor, self._op("opaque", _unseen, unread, {}, unread) if unread else None, "constant")
        node: Node = self.nodes[tensor]
        if self.versions[node] != _version(tensor):  # changed through another tensor that shares its memory
            inputs = tuple(dict.fromkeys((node, self.writes.get(storage_of(tensor), node))))
            node = self.new(tensor, self._op("alias", _unseen, inputs, {}, inputs))
        return node

    def _unread(self) -> tuple[Node, ...]:
        """Return the tensors of the running module that no operation has read yet."""
        call = self.stack[-1] if self.stack else None
        ops = list(itertools.takewhile(lambda op: call is None or op.index > call.start, reversed(self.trace.ops)))
        made = dict.fromkeys([*(call.inputs if call else ()), *(node for op in reversed(ops) for node in op.outputs)])
        return tuple(made.keys() - {node for op in ops for node in op.inputs})


def _name(function: Any) -> str:
    """Return the name of a function, the same one for methods, operators and in-place forms."""
    name = getattr(function, "__name__", str(function))
    if name == "__get__":  # a property such as `x.T`
        name = getattr(function.__self__, "__name__", name)
    name = name.partition(".")[0]  # of an overload such as torch.ops.aten.add.Tensor
    special = re.fullmatch("__[ir]?(add|mul|matmul)__|__i?true(div)__|(mul)tiply|true_(div)ide", name)
    return next(filter(None, special.groups())) if special else name.strip("_")


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else version_of(tensor)

"""What one forward of a model does: its tensors, the operations between them, and the calls of its modules.

A `Trace` is plain data, without references to the model or its tensors. Analyses are functions of a trace:

    trace = record(model, example)                # see record.py
    for op in trace.ops:                          # in the order of execution
        op.name, op.inputs, op.outputs, op.call
    for call in trace.calls:                      # in the order in which the modules were entered
        call.name, call.arguments, call.output

A `Node` is one value of a tensor: an in-place operation gives the tensor a new node. Everything is numbered by one
clock, so the operations of a call are those with `call.start < op.index < call.end`, and a node was made before another
if its index is smaller.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hookdrop.core.tensor_tree import TensorKey, leaves_of, map_leaves, map_tensor


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

"""Find the residual additions in a trace.

A residual is an addition of a skip and a branch of one shape, or a difference. The skip, or a term of the sum that it
is, is an ancestor of the branch, with weights in between; or the skip is a projection: one layer, or a function, beside
a longer branch. The branch ends with the last module whose output reaches the addition through linear operations that
keep the size: a gain, dropout, a permutation. If the branch is a sum itself (GPT-J adds attention and MLP first), each
term has an end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hookdrop.survey.ops import AFFINE, CATS, CROPS, PARTS, SIZE_KEEPING
from hookdrop.survey.regions import Regions
from hookdrop.survey.replay import replay
from hookdrop.survey.trace import Call, Node, Op, Trace


@dataclass(eq=False)
class Residual:
    """An addition of a skip and a branch."""

    op: Op
    skip: Node
    branch: Node
    root: Node
    """The tensor from which both come: the skip, or what it is a sum with, or the input of a projection."""
    inside: set[Node] = field(default_factory=set)
    """What is computed for the branch alone."""
    before: set[Node] = field(default_factory=set)
    """What lies between the root and the branch, with both."""
    passed: set[Node] = field(default_factory=set)
    """The tensors of the stream between the root and the addition: the skip, and what it is a sum with."""
    is_projection: bool = False
    """Whether the skip is computed from the root by layers."""
    has_shared_end: bool = False
    """Whether the module at the end of the branch returns a tensor that has other uses."""
    ends: list[list[Call]] = field(default_factory=list)
    """The calls that may be the end of each term of the branch, the last of the forward first."""

    @property
    def output(self) -> Node:
        """The sum."""
        return self.op.outputs[-1]


def find_residuals(trace: Trace) -> list[Residual]:
    """Return all residual additions of a trace, in the order of execution."""
    return list(_Search(trace).found.values())


class _Search:
    """One pass over the operations."""

    def __init__(self, trace: Trace) -> None:
        self.trace, self.regions = trace, Regions(trace)
        self.roots: dict[Node, list[Node]] = {}
        """The nodes for which a node stands as a skip, the most recent first."""
        self.outputs: dict[Node, list[Call]] = {}
        for call in trace.calls:
            nodes = [node for node in call.outputs if node.fits]
            if nodes:  # the first is the one that a hook on the module sees
                self.outputs.setdefault(nodes[0], []).append(call)
        self.found: dict[Node, Residual] = {}
        for op in trace.ops:
            self.now = op.index
            residual = self._residual(op)
            if residual is not None:
                self._add(residual)
                continue
            for node in op.outputs:
                inputs = [one for one in op.inputs if one.fits and one.is_data == node.is_data]
                same = op.name in CROPS or all(one.size == node.size for one in inputs)
                inherits = is_linear(op) and len(inputs) == 1 and same
                # A sum of a tensor and itself, with gains, belongs to its stream too.
                chains = [self.roots.get(one, [one]) for one in (inputs if inherits else added(op) or [])]
                self.roots[node] = [node, *(one for one in chains[0] if one in chains[-1])] if chains else [node]

    def _add(self, residual: Residual) -> Residual:
        self.found[residual.output] = residual
        residual.ends = self._ends(residual, residual.branch)
        self.roots[residual.output] = [residual.output, *self.roots.get(residual.skip, [residual.skip])]
        return residual

    def _start(self, node: Node) -> Node:
        """Return the first tensor of the stream that a tensor belongs to."""
        roots = self.roots.get(node, [node])
        return next(one for one in reversed(roots) if one.size == node.size)

    def _residual(self, op: Op) -> Residual | None:
        ops, terms = _terms(op)
        pairs = [terms, terms[::-1]] if terms and op.name not in ("sub", "rsub") else [terms][: len(terms)]
        orders = [(a, b) for a, b in pairs if a.size == op.outputs[-1].size]
        # A branch that has other uses, such as one that positions are added to, is no branch.
        sums = [Residual(op, a, b, a, inside) for a, b in orders if (inside := self.regions.before(b, ops[0]).inside)]
        for find in (self._stream, self._projection):
            found = [one for one in sums if find(one)]
            if len(found) == 1:
                return found[0] if added(op) or _is_sum(ops, found[0]) else None
        return None

    def _stream(self, residual: Residual) -> bool:
        """Whether a branch is computed from the stream of its skip; fill in the root, and what lies between."""
        skip, branch = residual.skip, residual.branch
        roots = self.roots.get(skip, [skip])
        root = next((one for one in roots if one is branch or self.trace.leads(one, branch)), None)
        if root is None or self._cancels(residual, root):
            return False
        residual.before, others = self._between(root, branch, residual.inside)
        if root in residual.before and not self._computes(root, branch, residual.before):
            return False
        if residual.op.name != "add" and not have_weights(residual.before - {root}):
            return False  # a difference from a moving average
        residual.root, residual.passed = root, {*roots[: roots.index(root)]}
        if root in residual.before:
            if (first := self._first_of_two(residual)) is None:
                return True
            others = [first.output]
        for other in others:  # of a second stream, whose branches are computed from the first one
            start = self._start(skip)
            if self._start(other) is not start and any(self._start(x) is start for x in self.found[other].before):
                residual.root, residual.before = other, self._between(other, branch, residual.inside)[0]
                return True
        return False

    def _cancels(self, residual: Residual, root: Node) -> bool:
        """Whether a branch goes on from the skip, or takes it away, as in `x + (f(x) - x)`."""
        skip, branch = (self.roots.get(one, [one]) for one in (residual.skip, residual.branch))
        if root in branch or branch[-1].op is None or any(map(self._producers, branch)):
            return root in branch
        taken = (added(branch[-1].op) or [branch[-1]] * 2)[residual.op.name == "add"]
        ways = [branch, *(way[: way.index(root)] for way in (skip, self.roots.get(taken, [taken])) if root in way)]
        gains = [one for way in ways for one in way if one.op and one.op.name in ("mul", "div", "neg")]
        return branch[-1].op.name in ("sub", "rsub") and len(ways) == 3 and not gains

    def _between(self, root: Node, branch: Node, inside: Collection[Node]) -> tuple[set[Node], list[Node]]:
        """Return what lies between a root and a branch, with both, and the sums at which the way ends before the root.

        A stream goes on from a sum, so that what is computed from it is no part of an earlier branch, unless the sum
        is inside the branch.
        """
        earlier = self.found.keys() - {*inside}
        way = self.trace.path(root, [branch], lambda op: op.inputs if earlier.isdisjoint(op.outputs) else ())
        found = {*way} - earlier
        begins = root is branch or any(node.op and root in node.op.inputs for node in found)
        return found | ({root} if begins else set()), [node for node in way if node in earlier]

    def _computes(self, root: Node, branch: Node, before: set[Node]) -> bool:
        """Whether weights, or a module that gets the root, lie between a root and a branch."""
        if have_weights(before - {root}):
            return True
        # FNet's Fourier transform has no weights.
        calls = [call for call in self.trace.calls if root in call.inputs and call.end < self.now]
        returned = {node for call in calls for node in call.outputs[:1]}
        return root not in self.roots.get(branch, ()) and not before.isdisjoint(returned - {root})

    def _first_of_two(self, second: Residual) -> Residual | None:
        """Return the first sum of a RevNet's block, y1 = x1 + f(x2) and y2 = x2 + g(y1), given the second one."""
        root, before = second.root, second.before
        for node in sorted(before - {root, second.branch}, key=lambda node: node.index):
            terms = added(node.op) if node.op is not None and node not in self.found else None
            ends = [*self.regions.uses(node), *([None] if node in self.regions.outputs else [])]
            goes_on = any(use is None or before.isdisjoint(use.outputs) for use in ends)
            if terms is None or not goes_on or node.op is None or node.shape != root.shape:
                continue
            for skip, branch in (terms, terms[::-1]):
                inside = self.regions.before(branch, node.op).inside
                if inside and branch in before and skip.is_data and skip not in before:
                    first = Residual(node.op, skip, branch, root, inside, self._between(root, branch, inside)[0])
                    if self._computes(root, branch, first.before):
                        return self._add(first)
        return None

    def _projection(self, residual: Residual) -> bool:
        """Whether a skip is one layer, or a function, beside a longer branch; fill in the root, and what lies between.

        A further branch beside the same projection counts too.
        """
        op, skip, branch = residual.op, residual.skip, residual.branch
        if op.name != "add":
            return False
        known = self.found.get(skip)
        root, path = (known.root, set[Node]()) if known and known.is_projection else self._projected(residual)
        if root is None or not self.trace.leads(root, branch) or self._cancels(residual, root):
            return False
        residual.root, residual.is_projection = root, True
        residual.before = self._between(root, branch, residual.inside)[0]
        reads = {node.op.name for node in residual.before if node.op and root in node.op.inputs}
        # Not where the branch reads a part of it, such as other time steps.
        is_region = bool(reads - CROPS) and all(use.name in CROPS for use in self._leaks(residual))
        return is_region and (known is not None or _is_projection(path, residual))

    def _leaks(self, residual: Residual) -> Iterator[Op]:
        """Yield the operations outside a branch that read what lies between its root and its end."""
        for node in residual.before - {residual.root, residual.branch}:
            yield from (use for use in self.regions.uses(node) if residual.before.isdisjoint(use.outputs))

    def _projected(self, residual: Residual) -> tuple[Node | None, set[Node]]:
        """Return the one tensor that a skip is computed from and that has other uses, and what lies between."""
        region = self.regions.before(residual.skip, residual.op)
        entries = {node for node in region.entries if node.is_data and node.fits}
        inside = {node for node in region.inside if node.is_data}
        # A skip that contains a sum belongs to a second stream.
        is_projected = len(entries) == 1 and self.found.keys().isdisjoint(inside)
        return (entries.pop(), inside) if is_projected else (None, set())

    def _is_joined(self, residual: Residual, node: Node) -> bool:
        """Whether the rest of a tensor, of which a part is added, is concatenated with the sum, as in a ReXNet."""
        for use in self.regions.uses(node):
            others = [other for one in use.outputs if one not in residual.inside for other in self.regions.uses(one)]
            if any(other.name not in CATS or residual.output not in other.inputs for other in others):
                return False
        return node not in self.regions.outputs

    def _producers(self, node: Node) -> list[Call]:
        """Return the calls that returned a node before the current operation, the last first."""
        calls = [call for call in self.outputs.get(node, []) if call.end < self.now]
        return sorted(calls, key=lambda call: -call.end)

    def _ends(self, residual: Residual, node: Node) -> list[list[Call]]:
        """Return the candidates for the end of each term of a branch; none if one of the terms has no end."""
        calls: list[Call] = []
        while node.op is not None and node in residual.before:
            if node not in residual.inside and not self._is_joined(residual, node):
                break
            calls += self._producers(node)
            if (known := self.found.get(node)) is not None:
                others = residual.before - {node, residual.root}
                if calls or not (known.is_projection or others.isdisjoint(self.found)):
                    break
                del self.found[node]  # no skip: one of several terms
            terms = [] if calls else [term for term in added(node.op) or () if term in residual.before]
            if len(terms) == 2:
                # What the other term is computed from too is no end: `x + (h + f(h))`.
                found = [
                    [call for call in calls if not self.trace.leads(call.outputs[0], other)]
                    for term, other in (terms, terms[::-1])
                    if residual.root not in self.roots.get(term, [term])  # a part of the skip
                    for calls in self._ends(residual, term) or [[]]
                ]
                return found if all(found) else []
            inputs = [one for one in node.op.inputs if one.fits and one in residual.before]
            if not is_linear(node.op) or len(inputs) != 1:
                break
            node = inputs[0]
        residual.has_shared_end |= not calls and bool(self._producers(node)) and node is not residual.root
        return [calls] if calls else []


def added(op: Op) -> tuple[Node, Node] | None:
    """Return the two terms of an addition, or of a difference, of tensors; one may be broadcast to the other."""
    if op.name not in ("add", "sub", "rsub") or len(op.inputs) != 2 or not op.outputs:
        return None
    a, b = op.inputs if op.name != "rsub" else op.inputs[::-1]
    fit = all(node.fits or (node.dtype.is_complex and node.shape) for node in (a, b))
    return (a, b) if fit and max(a.size, b.size) == op.outputs[-1].size else None


def _terms(op: Op) -> tuple[list[Op], list[Node]]:
    """Return what may add two terms, and them: an addition, a function such as `index_add`, or the sum of a stack."""
    if terms := added(op):
        return [op], [*terms]
    data = [node for node in op.inputs if node.is_data and node.fits]
    if len(data) == 1 and (join := data[0].op) and join.name in ("stack", *CATS) and not has_weights(op):
        return [join, op], _terms(join)[1]
    return [op], data if len(data) == 2 and op.name not in ("mul", "div") and op.outputs else []


def _is_sum(ops: Sequence[Op], residual: Residual) -> bool:
    """Whether operations return a multiple of the skip plus something linear in the branch: try it with numbers."""

    def numbers(node: Node, scale: float = 1.0) -> Tensor:
        x = torch.arange(1.0, node.size + 1, dtype=torch.float64, device="cpu").sin().mul(scale).view(node.shape)
        return x if node.fits else x.mul(0).to(node.dtype)  # such as indices

    def run(a: float, b: float) -> Tensor:
        values = {residual.skip: numbers(residual.skip, a), residual.branch: numbers(residual.branch, b)}
        return replay(ops, values, numbers)[residual.output].flatten()

    with suppress(Exception):  # not to be repeated
        x, skip, branch = numbers(residual.skip).flatten(), run(1, 0), run(0, 1)
        same = map(torch.allclose, (skip, run(1, 1), run(0, 2)), (skip[0] / x[0] * x, skip + branch, 2 * branch))
        return all(same) and bool(skip.any() and branch.any())
    return False


def has_weights(op: Op) -> bool:
    """Whether an operation combines its tensors with weights."""
    return op.name == "opaque" or any(node.has_weights and not node.is_data for node in op.inputs)


def have_weights(nodes: Collection[Node]) -> bool:
    """Whether weights combine features on the way to some tensors, other than gains and biases."""
    ops = [node.op for node in nodes if node.op is not None]
    return any(has_weights(op) and op.name not in ("add", "sub", "mul", "div") for op in ops)


def _is_projection(skip: set[Node], residual: Residual) -> bool:
    """Whether what computes a skip is a projection, given the branch."""
    layers, names = _length(residual.skip, skip, norms=False), {node.op.name for node in skip if node.op}
    return (
        _length(residual.branch, residual.before - {residual.root}) > _length(residual.skip, skip)
        and layers < 2  # not two branches without a skip, such as routed and shared experts
        and not names <= PARTS  # a part of a tensor, as in Res2Net
        and not all(is_affine(node.op) for node in residual.before - {residual.root} if node.op)  # LoRA
    )


def _length(end: Node, inside: set[Node], norms: bool = True) -> int:
    """Return the most operations with weights on the way to a tensor, among those that computed some tensors."""
    lengths: dict[Node, int] = {}
    for node in sorted(inside, key=lambda node: node.index):
        if (op := node.op) is not None:
            counts = has_weights(op) and (norms or "norm" not in op.name)
            lengths[node] = max((lengths.get(one, 0) for one in op.inputs), default=0) + counts
    return lengths.get(end, 0)


def is_linear(op: Op) -> bool:
    """Whether an operation keeps the size of a tensor, or crops it, and is linear in it."""
    if op.name in ("masked_fill", "add", "sub"):  # `sum` of Python begins with 0
        return len(op.inputs) == 1 + (op.name == "masked_fill") and bool(op.args[-1] == 0)
    return op.name in SIZE_KEEPING | CROPS


def is_affine(op: Op) -> bool:
    """Whether an operation is linear, with or without weights, or an addition."""
    return is_linear(op) or op.name in AFFINE

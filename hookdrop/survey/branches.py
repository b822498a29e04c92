"""Find the residual branches in a trace.

A residual is an addition of a skip and a branch of one shape, or a difference. The skip, or a term of the sum that it
is, is an ancestor of the branch, with weights in between; or the skip is a projection: one layer, or a function, beside
a longer branch. The branch ends with the last module whose output reaches the addition through linear operations that
keep the size: a gain, dropout, a permutation. If the branch is a sum itself (GPT-J adds attention and MLP first), each
term has an end.
"""

from __future__ import annotations

import functools
import itertools
import operator
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from hookdrop.survey.ops import AFFINE, CROPS, ENLARGING, FUSED_ATTENTION, MIXTURES, PARTS, PRODUCTS, SIZE_KEEPING
from hookdrop.survey.trace import Call, Node, Op, Trace


@dataclass(frozen=True)
class Branch:
    """A residual branch. All names are full names of modules."""

    layer: str
    """The outermost block around the addition that adds branches: in BERT, the layer around both of its outputs."""
    end: str
    """The last module of the branch, whose output reaches the addition."""
    shape: tuple[int, ...]
    """The shape of the output of `end`."""
    parts: tuple[str, ...] = ()
    """All modules whose output reaches the addition, `end` first, if nothing but linear operations follows them."""


@dataclass(eq=False)
class Residual:
    """An addition of a skip and a branch."""

    op: Op
    skip: Node
    branch: Node
    root: Node
    """The tensor from which both come: the skip, or what it is a sum with, or the input of a projection."""
    is_projection: bool = False
    """Whether the skip is computed from the root by layers."""
    before: set[Node] = field(default_factory=set)
    """The root, and what the branch was computed from since then."""
    ends: list[list[Call]] = field(default_factory=list)
    """The calls that may be the end of each term of the branch, the last of the forward first."""

    @property
    def output(self) -> Node:
        """The sum."""
        return self.op.outputs[-1]


def find_residuals(trace: Trace) -> tuple[list[Residual], list[Residual]]:
    """Return all residual additions of a trace, in the order of execution, and what mixes a skip with a branch."""
    search = _Search(trace)
    search.run()
    return list(search.found.values()), search.mixtures


def find_branches(trace: Trace, everything: list[Residual]) -> tuple[Branch, ...]:
    """Return the residual branches of a trace with these additions, in the order of execution."""
    residuals = _without_long_skips([residual for residual in everything if residual.ends])
    usable = _usable_ends(trace, everything)
    layers = _layers(residuals, usable)
    found: dict[tuple[str, str], Branch] = {}
    for residual in residuals:
        for calls in residual.ends:
            usable_calls = [call for call in calls if call.name in usable]
            if usable_calls:
                parts = tuple(dict.fromkeys(call.name for call in usable_calls))
                branch = Branch(layers[residual], parts[0], usable_calls[0].outputs[0].shape, parts)
                found.setdefault((branch.layer, branch.end), branch)
    return tuple(found.values())


def find_gaps(
    trace: Trace, everything: list[Residual], mixtures: list[Residual]
) -> tuple[Mapping[str, str], tuple[Call, ...]]:
    """Return what no end of a branch can drop.

    These are the layers with a branch that does not end with a module, each with the reason, and the calls that
    multiply two tensors as matrices outside of the branches.
    """
    kept = _without_long_skips([residual for residual in everything if residual.ends])
    inside = {node for residual in kept for node in residual.before - {residual.root}}
    sums = {residual.output for residual in kept}
    usable = _usable_ends(trace, everything)
    shared = [one for one in kept if usable.isdisjoint(call.name for calls in one.ends for call in calls)]
    reasons: dict[str, str] = {}
    for one in [*(one for one in everything if not one.ends), *shared, *mixtures]:
        if one.output not in inside and sums.isdisjoint(one.before - {one.root}):
            how = f"combines its skip and its branch by {one.op.name}(), not as skip + branch"
            why = f"it {how}" if one in mixtures else "a residual branch there does not end with a module"
            reasons.setdefault(_home_name(one), why)
            inside |= one.before - {one.root}
    products = PRODUCTS | {FUSED_ATTENTION}
    ops = [op for op in trace.ops if op.name in products and inside.isdisjoint(op.outputs)]
    apart = [op.call for op in ops if op.call and sum(node.fits and node.is_data for node in op.inputs) > 1]
    return reasons, tuple(dict.fromkeys(apart))


class _Search:
    """One pass over the operations."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.behind: dict[Node, int] = {}
        """The ancestors that reach a node through weights, as bits."""
        self.roots: dict[Node, list[Node]] = {}
        """The nodes for which a node stands as a skip, the most recent first."""
        self.outputs: dict[Node, list[Call]] = {}
        for call in trace.calls:
            nodes = [node for node in call.outputs if node.fits]
            if nodes:  # the first is the one that a hook on the module sees
                self.outputs.setdefault(nodes[0], []).append(call)
        self.found: dict[Node, Residual] = {}
        self.mixtures: list[Residual] = []
        self.now = 0

    def run(self) -> None:
        for op in self.trace.ops:
            self.now = op.index
            through = self.trace.ancestors if has_weights(op) else self.behind
            behind = functools.reduce(operator.or_, (through.get(node, 0) for node in op.inputs), 0)
            self.behind.update(dict.fromkeys(op.outputs, behind))
            residual = self._residual(op)
            if residual is not None:
                for one in (*self._coupled(residual), residual):
                    self.found[one.output] = one
                    one.before = {one.root, *self.trace.path(one.root, [one.branch])}
                    one.ends = [calls for calls in self._ends(one, one.branch) if calls]
            elif (mixture := self._mixture(op)) is not None:
                mixture.before = {mixture.root, *self.trace.path(mixture.root, [mixture.branch])}
                self.mixtures.append(mixture)
            for node in op.outputs:
                self.roots[node] = [node, *self._inherited_roots(op, node, residual)]

    def _inherited_roots(self, op: Op, node: Node, residual: Residual | None) -> list[Node]:
        if residual is not None:
            return self.roots.get(residual.skip, [residual.skip])
        inputs = [one for one in op.inputs if one.fits and one.is_data == node.is_data]
        same = op.name in CROPS or all(one.size == node.size for one in inputs)
        return self.roots.get(inputs[0], [inputs[0]]) if is_linear(op) and len(inputs) == 1 and same else []

    def _residual(self, op: Op) -> Residual | None:
        terms = added(op)
        if terms is None:
            return None
        a, b = terms
        forward = self._root(a, b) if self._is_only_added(b) else None
        backward = self._root(b, a) if self._is_only_added(a) and op.name == "add" else None
        if (forward is None) != (backward is None):
            return Residual(op, a, b, forward) if forward is not None else Residual(op, b, a, backward or b)
        return self._projection(op, a, b) if op.name == "add" else None

    def _is_only_added(self, branch: Node) -> bool:
        """Whether an addition is the only use of a tensor: one that positions are added to goes on without them."""
        return len([op for op in self.trace.users[branch] if any(node.fits for node in op.outputs)]) == 1

    def _root(self, skip: Node, branch: Node) -> Node | None:
        """Return the most recent root of `skip` that reaches `branch` through weights, or through a module."""
        roots = self.roots.get(skip, [skip])
        behind = self.behind.get(branch, 0)
        found = next((root for root in roots if behind & self.trace.bit[root]), None)
        if found is None:  # FNet's Fourier transform has no weights
            calls, node = self._producers(branch), branch
            while node.op is not None and is_linear(node.op) and (before := _data_input(node.op)) is not None:
                node = before
                calls += self._producers(node)
            found = next((root for root in roots if any(root in call.inputs for call in calls)), None)
            if found is not None and found in self.roots.get(branch, ()):
                return None
        return found

    def _projection(self, op: Op, a: Node, b: Node) -> Residual | None:
        since = op.call.start if op.call is not None else -1
        lengths = _lengths(a, since), _lengths(b, since)
        common = [node for node in lengths[0].keys() & lengths[1].keys() if node.fits and node.is_data]
        if not common:
            return None
        root = max(common, key=lambda node: node.index)
        of_a, of_b = lengths[0][root], lengths[1][root]
        for skip, branch in ((a, b), (b, a)):  # a further branch beside the same projection
            if skip in self.found and self.found[skip].is_projection and self.found[skip].root is root:
                return Residual(op, skip, branch, root, True)
        skip, branch = (a, b) if of_a < of_b else (b, a)
        path, around = _path(skip, root), [node.op for node in self.trace.path(root, [branch]) if node.op is not None]
        layers, names = [one for one in path if has_weights(one) and "norm" not in one.name], {x.name for x in path}
        if (
            of_a == of_b
            or not path
            or root not in path[-1].inputs
            or len(layers) > 1  # two branches without a skip, such as routed and shared experts
            or names <= PARTS  # a part of a tensor, as in Res2Net
            or all(map(is_affine, around))  # LoRA: two linear layers beside one
            or (names.isdisjoint(ENLARGING) and any(one.name in ENLARGING for one in around))  # levels of a pyramid
        ):
            return None
        return Residual(op, skip, branch, root, True)

    def _coupled(self, residual: Residual) -> Iterator[Residual]:
        """Yield the first sum of a RevNet's block, y1 = x1 + f(x2) and y2 = x2 + g(y1), given the second one."""
        root, branch = self.trace.bit[residual.root], self.trace.path(residual.root, [residual.branch])
        inside = {*branch, residual.output}
        for op in (node.op for node in branch if node.op is not None and node not in self.found):
            terms = added(op)
            if terms is None or residual.is_projection or op.outputs[-1].shape != residual.root.shape:
                continue
            users = [user.outputs for user in self.trace.users[op.outputs[-1]]]
            goes_on = op.outputs[-1] in self.trace.outputs or not all(map(inside.intersection, users))
            for a, b in (terms, terms[::-1]):
                if goes_on and a.is_data and not self.trace.ancestors[a] & root and self.behind[b] & root:
                    yield Residual(op, a, b, residual.root)

    def _mixture(self, op: Op) -> Residual | None:
        """Return a combination of a tensor and of what layers compute from it that is no plain addition."""
        gated = [node.op for node in op.inputs if op.name == "add" and node.op is not None and node.op.name == "mul"]
        terms = [node for one in gated or [op] for node in one.inputs if node.fits and node.is_data]
        if op.name in MIXTURES and len(op.outputs) == 1:
            for skip, branch in itertools.permutations(dict.fromkeys(terms), 2):
                if skip.size == branch.size and self._is_only_added(branch) and (root := self._root(skip, branch)):
                    return Residual(op, skip, branch, root)
        return None

    def _producers(self, node: Node) -> list[Call]:
        """Return the calls that returned a node before the current operation, the last first."""
        calls = [call for call in self.outputs.get(node, []) if call.end < self.now]
        return sorted(calls, key=lambda call: -call.end)

    def _ends(self, residual: Residual, node: Node) -> Iterator[list[Call]]:
        """Yield the candidates for the end of each term of a branch."""
        root, ancestors, calls = self.trace.bit[residual.root], self.trace.ancestors, []
        paths = self.behind if self.behind.get(node, 0) & root else ancestors
        while paths.get(node, 0) & root and node is not residual.root:
            calls += self._producers(node)
            op = node.op
            if node in self.found:
                if not self.found[node].is_projection or calls:
                    break
                del self.found[node]  # no projection: one of several branches
            if op is None:
                break
            terms = [] if calls else [x for x in added(op) or () if paths.get(x, 0) & root]
            if len(terms) == 2:
                for term in terms:
                    yield from self._ends(residual, term)
                return
            inputs = [one for one in op.inputs if one.fits and ancestors[one] & root]
            if not is_linear(op) or len(inputs) != 1:
                break
            node = inputs[0]
        yield calls


def added(op: Op) -> tuple[Node, Node] | None:
    """Return the two terms of an addition, or of a difference, of tensors of one size."""
    if op.name not in ("add", "sub", "rsub") or len(op.inputs) != 2 or not op.outputs:
        return None
    a, b = op.inputs if op.name != "rsub" else op.inputs[::-1]
    return (a, b) if a.fits and b.fits and a.size == b.size == op.outputs[-1].size else None


def has_weights(op: Op) -> bool:
    """Whether an operation combines its tensors with weights."""
    return op.name == "opaque" or any(node.has_weights and not node.is_data for node in op.inputs)


def _lengths(node: Node, since: int) -> dict[Node, int]:
    """Return the ancestors that a node has since a time, each with the most operations with weights in between."""
    lengths = {node: 0}
    waiting = [node]
    while waiting:
        node = max(waiting, key=lambda one: one.index)
        waiting.remove(node)
        if node.op is None or node.index < since:
            continue
        weighted = has_weights(node.op)
        for one in node.op.inputs:
            if one not in lengths:
                waiting.append(one)
            lengths[one] = max(lengths.get(one, 0), lengths[node] + weighted)
    return lengths


def _data_input(op: Op) -> Node | None:
    """Return the tensor that an operation changes, if it reads only one that depends on the example."""
    data = {one for one in op.inputs if one.fits and one.is_data}
    return data.pop() if len(data) == 1 else None


def _path(node: Node, root: Node) -> list[Op]:
    """Return the operations on one tensor from the root to a node, the last first; those up to a second tensor."""
    found: list[Op] = []
    while node is not root and node.op is not None and (before := _data_input(node.op)) is not None:
        found.append(node.op)
        node = before
    return found


def is_linear(op: Op) -> bool:
    """Whether an operation keeps the size of a tensor, or crops it, and is linear in it."""
    if op.name in ("masked_fill", "add", "sub"):  # `sum` of Python begins with 0
        return len(op.inputs) == 1 + (op.name == "masked_fill") and bool(op.args[-1] == 0)
    return op.name in SIZE_KEEPING | CROPS


def is_affine(op: Op) -> bool:
    """Whether an operation is linear, with or without weights, or an addition."""
    return is_linear(op) or op.name in AFFINE


def _without_long_skips(residuals: list[Residual]) -> list[Residual]:
    """Leave out skips around several blocks, and blocks inside a branch, such as the attention of a gate."""
    # What a decoder adds to the queries of an attention, whose stream goes on without it: positions, older than that.
    positions = {
        one
        for outer in residuals
        for one in residuals
        if one.root.index < outer.root.index and one.output in outer.before and outer.root in one.before
    }
    residuals = [one for one in residuals if one not in positions]
    left_out: set[Residual] = set()
    for outer in residuals:
        since, home = outer.root.index, _home_name(outer)
        inside = [one for one in residuals if one.output in outer.before and one.root.index >= since]
        inner = [one for one in inside if _home_name(one) != home]
        # What an attention adds to its queries alone: the stream goes on without it.
        aside = [one for one in inside if one.root is outer.root and one.skip in outer.before and not one.is_projection]
        homes = {_home_name(one) for one in inner}
        outermost = [name for name in homes if not any(f"{name}.".startswith(f"{one}.") for one in homes - {name})]
        left_out.update([outer] if len(outermost) > 1 else [*inner, *aside])
    return [one for one in residuals if one not in left_out]


def _usable_ends(trace: Trace, residuals: list[Residual]) -> set[str]:
    """Return the modules that may be ends: each of their calls is the end of a branch.

    Others, such as a dropout that several branches share, also run inside a branch, or before the end of another.
    """
    terms = [calls for residual in residuals for calls in residual.ends]
    counts = Counter(call.name for call in {call for calls in terms for call in calls})
    usable = {name for name, count in counts.items() if name and count == len(trace.calls_of[name])}
    while True:
        ends = [next((call.name for call in calls if call.name in usable), "") for calls in terms]
        inside = {call.name for calls, end in zip(terms, ends, strict=True) for call in calls if call.name != end}
        wrong = inside & set(ends)
        if not wrong:
            return usable
        usable -= wrong


def _layers(residuals: list[Residual], usable: set[str]) -> dict[Residual, str]:
    """Return the layer of each residual: the outermost block around it, unless that block is a stack of layers."""
    homes = {residual: _home_name(residual) for residual in residuals}
    ends = {one: next((call.name for calls in one.ends for call in calls if call.name in usable), "") for one in homes}
    patterns: dict[str, dict[str, str]] = {}
    for residual, home in homes.items():
        patterns.setdefault(home, {})[ends[residual]] = re.sub(r"\.\d+(?=\.)", ".#", f".{ends[residual]}.")
    # Several ends whose names differ in an index only belong to several layers.
    stacks = {home for home, names in patterns.items() if not home or len(set(names.values())) < len(names)}
    blocks = {home for home in homes.values() if home not in stacks}
    layers = {}
    for residual, home in homes.items():
        around = [block for block in blocks if f"{home}.".startswith(f"{block}.")]
        layers[residual] = min(around, key=len) if around else ends[residual]
    return layers


def _home_name(residual: Residual) -> str:
    """Return the module in which the branch starts, around one that gets it as an argument, as in BERT's output."""
    root, call = residual.root, residual.op.call
    first = max((n.op.index for n in residual.before - {root} if n.op and root in n.op.inputs), default=root.index)
    while call is not None and call.start > max(first, root.index):
        call = call.parent
    return "" if call is None else call.name

"""Find the layers whose input has the heads of attention side by side, and which feature belongs to which head.

The search starts at the products of attention (`scaled_dot_product_attention`, or a product after a softmax) and
follows their output to the first layer with weights, its projection. The operations in between are repeated on random
numbers: what the first feature depends on is zeroed, and the features that become 0 with it are the first head. A norm
over all heads, or a term that is added to them, then shows as features that change without becoming 0, or that do not
become 0.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hookdrop.core.tensor_tree import map_leaves
from hookdrop.survey.ops import CONVS, FUSED_ATTENTION, HIDDEN_ATTENTION, PRODUCTS, RECURRENT, SHOWN_ATTENTION, SOFTMAX
from hookdrop.survey.replay import CPU, replay
from hookdrop.survey.residuals import has_weights
from hookdrop.survey.trace import Call, Node, Op, Trace


@dataclass(frozen=True)
class Heads:
    """The heads in the last axis of a layer's input."""

    count: int
    """The number H of heads; with grouped queries, of query heads."""
    interleaved: bool = False
    """Whether feature f belongs to head f % H, as in (d H), and not to head f // d, as in (H d)."""


@dataclass(frozen=True)
class Scores:
    """The scores of attention that a module computes itself, and not a module inside it."""

    calls: tuple[bool, ...]
    """Which of the softmaxes and fused attentions in one call of the module have them, in the order of execution."""
    shapes: tuple[tuple[int, ...], ...]
    """Their shapes (..., L, S). A function that hides its operations shows none."""


_SUMMED = "its weights are multiplied and summed, not in a product of matrices"


class _NoHeadsError(Exception):
    """Why the input of a layer cannot be divided into heads."""


def find_heads(trace: Trace) -> dict[str, Heads | str]:
    """Return the heads by the name of the layer whose input has them, or why a layer after attention has none."""
    hidden = [op.call.name for op in trace.ops if op.name in HIDDEN_ATTENTION and op.call is not None]
    found: dict[str, Heads | str] = dict.fromkeys(hidden, "it computes its projection without calling the layer")
    projections: dict[Node, tuple[str, list[Op]]] = {}
    for core, factors in _cores(trace):
        if core.name == "sum":
            found.update({_home(trace, core, one): _SUMMED for node, one in factors if _are_weights(trace, node, one)})
            continue
        projection = _follow(trace, core)
        if isinstance(projection, str):
            found[core.call.name if core.call else ""] = projection
        elif projection is not None:
            projections.setdefault(projection[1], (projection[0].name, []))[1].append(core)
    known: dict[str, Heads | str] = {}
    for node, (layer, cores) in projections.items():
        starts = [core.outputs[0] for core in cores]
        ops = {one.op for start in starts for one in trace.path(start, [node]) if one.op} - {*cores}
        chain = _Chain(starts, node, ops)
        with CPU:  # whatever the default device
            heads = known[chain.key] = known.get(chain.key) or chain.heads()
        previous = found.setdefault(layer, heads)
        if previous != heads and not isinstance(previous, str):
            found[layer] = "its calls differ in the heads"
    return found


def attention_cores(trace: Trace) -> Iterator[Op]:
    """Yield the operations that multiply attention by the values."""
    return (core for core, _ in _cores(trace) if core.name != "sum")


def _cores(trace: Trace) -> Iterator[tuple[Op, list[tuple[Node, Op]]]]:
    """Yield these operations, or sums of elementwise products, with their factors that come from a softmax, and it."""
    weights: dict[Node, Op] = {}
    for op in trace.ops:
        known = [(node, weights[node]) for node in op.inputs if node in weights]
        if op.name == FUSED_ATTENTION:
            yield op, []
        elif op.name in SOFTMAX:
            weights.update(dict.fromkeys(op.outputs, op))
        elif known and op.name in PRODUCTS and not _has_constant(op):
            yield op, known
        elif op.name == "sum" and known and (product := op.inputs[0].op) and product.name == "mul":
            factors = [(node, weights[node]) for node in product.inputs if node in weights]
            yield op, factors if len(factors) < sum(node.is_data for node in product.inputs) else []
        elif known:
            weights.update(dict.fromkeys(op.outputs, max((softmax for _, softmax in known), key=_index)))


_index = operator.attrgetter("index")


def find_scores(trace: Trace) -> dict[str, Scores | str]:
    """Return the scores by the innermost module that computes attention, or why it has none that are clear."""
    pairs = [(op, op) for op in trace.ops if op.name == SHOWN_ATTENTION]
    for core, known in _cores(trace):
        softmaxes = [softmax for one, softmax in known if _are_weights(trace, one, softmax)]
        pairs += [(core, one) for one in ([core] if core.name == FUSED_ATTENTION else softmaxes)]
    found: dict[Op, tuple[str, bool | str]] = {}
    mixing, cache = {op for op in trace.ops if op.name in RECURRENT}, dict[str, bool | str]()
    for core, softmax in sorted(pairs, key=lambda pair: pair[0].index):
        verdict = _weighs_positions(trace, core, softmax, mixing, cache)
        mixing |= {core} if verdict is True else set()
        if found.get(softmax, ("", False))[1] is not True:
            found[softmax] = _home(trace, core, softmax), verdict
    return {name: _scores_of(trace, name, {op: one for op, (home, one) in found.items() if home == name})
            for name in dict(found.values())}  # fmt: skip


def _home(trace: Trace, core: Op, softmax: Op) -> str:
    """Return the innermost module around both, or that which computes the scores for a module beside it."""
    both = next((call for call in (core.call.around() if core.call else ()) if call.start < softmax.index), None)
    own = softmax.call.around() if softmax.call else ()
    first = next((call for call in own if trace.kinds[call.name][1]), both)  # with parameters
    return max((one for one in (both, first) if one), key=lambda call: call.start).name if both else ""


def _scores_of(trace: Trace, name: str, own: dict[Op, bool | str]) -> Scores | str:
    """Return the scores of a module, given which of its softmaxes weigh positions."""
    counted = [op for op in trace.ops if op.name in {*SOFTMAX, FUSED_ATTENTION, SHOWN_ATTENTION} and not op.is_hidden]
    calls, *others = {tuple(own.get(op) is True for op in counted if call.start < op.index < call.end)
                      for call in trace.calls_of[name]}  # fmt: skip
    unclear = [one for one in own.values() if isinstance(one, str)] + ["its calls differ"] * bool(others)
    if unclear or not any(calls):
        return unclear[0] if unclear else "its softmax weighs no positions"
    clear = [op for op, one in own.items() if one is True and op.name != SHOWN_ATTENTION]
    # Fused attention has queries (..., L, d) and keys (..., S, d).
    keys = [op.argument(1, "key").shape[-2] if op.name == FUSED_ATTENTION else op.inputs[0].shape[-1] for op in clear]
    return Scores(calls, tuple((*op.inputs[0].shape[:-1], key) for op, key in zip(clear, keys, strict=True)))


def _are_weights(trace: Trace, node: Node, softmax: Op) -> bool:
    """Whether the factor of a product is the result of a softmax over the last axis, and not of what it gates."""
    weights = softmax.outputs[0]
    is_last = softmax.argument(1, "dim") in (-1, len(weights.shape) - 1)
    way = [one.op for one in trace.path(weights, [node]) if one.op]
    is_alone = all(sum(one.is_data for one in op.inputs) == 1 and not has_weights(op) for op in way)  # as in windows
    return is_last and (is_alone or node.size == weights.size or node.shape[:-1] == weights.shape[:-1])


def _has_constant(op: Op) -> bool:
    """Whether an operation reads a tensor that does not depend on the example, such as a weight."""
    return any(not node.is_data for node in op.inputs)


def _weighs_positions(trace: Trace, core: Op, softmax: Op, mixing: set[Op], cache: dict[str, bool | str]) -> bool | str:
    """Return whether the keys of attention are positions of the example, or why this is unknown.

    A layer with weights treats all positions equally, and mixes features. So the values of two keys depend on different
    parts of what the last such layer gets if the keys are positions, and on the same if they are features or experts.
    What mixes positions hides this: other attention and recurrence.
    """
    if softmax.is_hidden:
        return "its softmax is inside code that no hook sees, such as that of torch.jit"
    if softmax.name == SHOWN_ATTENTION:  # it applies the weights itself
        return True
    if core.name == "sum":
        return _SUMMED
    weights = None if core is softmax else softmax.outputs[0]
    way = trace.path(weights, core.outputs) if weights else []
    values = [core.argument(2, "value")] if weights is None else [x for x in core.inputs if x not in (weights, *way)]
    ops = {node.op for node in way if node.op}
    starts = _sources(values, ops, mixing)
    chain = _Chain(starts, core.outputs[0] if weights else values[0], ops)
    if starts and chain.key not in cache:
        with CPU:
            cache[chain.key] = chain.weighs_positions(weights)
    if weights and starts and cache[chain.key] is True and _are_slots(trace, softmax, values, mixing):
        return "its keys are mixtures of the positions that a layer scores, such as slots of experts"
    return bool(starts) and cache[chain.key]


def _are_slots(trace: Trace, softmax: Op, values: Sequence[Node], mixing: set[Op]) -> bool:
    """Whether a layer computes the scores from what the values are mixtures of, as a router does in Soft MoE."""
    scoring = set[Op]()
    starts = _sources([softmax.inputs[0]], scoring, mixing)
    ways = {node.op for start in starts for node in trace.path(start, values)}
    scored, mixed = (
        any(op is not None and op.name in PRODUCTS and not _has_constant(op) for op in ops) for ops in (scoring, ways)
    )
    return mixed and not scored


def _sources(ends: Sequence[Node], ops: set[Op], mixing: set[Op]) -> list[Node]:
    """Return what the last layers with weights before some tensors get, and add the operations from there on."""
    starts, waiting = dict[Node, None](), [*ends]
    while waiting:
        node = waiting.pop()
        op = node.op
        data = [one for one in op.inputs if one.is_data and one.fits] if op else []
        if op is None or not data or op in mixing or _is_routed(op):
            starts.update({node: None} if node.is_data else {})
        elif op not in ops:
            ops.add(op)
            if op.name in PRODUCTS | CONVS and _has_constant(op) and op.argument(6, "groups", 1) == 1:
                starts.update(dict.fromkeys(data))
            else:  # of tensors that are added or multiplied, the last is enough
                equal = [] if op.name in {*PRODUCTS, FUSED_ATTENTION} else [x for x in data if x.shape == node.shape]
                waiting += sorted(equal, key=_index)[-1:] or data
    return [*starts]


def _is_routed(op: Op) -> bool:
    """Whether an operation chooses rows by numbers that depend on the example, as for experts."""
    return any(node.is_data and node.dtype in (torch.int32, torch.int64) for node in op.inputs)


def _follow(trace: Trace, core: Op) -> tuple[Call, Node] | str | None:
    """Return the layer that mixes the features of attention, with its input; or why none is called."""
    reached = {*core.outputs}
    for op in trace.ops[trace.ops.index(core) + 1 :]:
        if reached.isdisjoint(op.inputs):
            continue
        if op.name in SOFTMAX or op.name == FUSED_ATTENTION:
            return None
        if op.name.startswith("conv") and _has_constant(op):
            return "its projection is a convolution, whose features are not on the last axis"
        if op.name in PRODUCTS and _has_constant(op):
            return _entered(trace, op, core, reached) or "it computes its projection without calling a layer"
        reached.update(op.outputs)
    return None


def _entered(trace: Trace, op: Op, core: Op, reached: set[Node]) -> tuple[Call, Node] | None:
    """Return the innermost module around an operation that is called with a tensor that nothing else reads."""
    for call in op.call.around() if op.call else ():
        if call.start < core.index:
            return None
        entries = [node for node in call.inputs if node in reached]
        if entries and all(call.start < user.index < call.end for user in trace.users[entries[-1]]):
            return call, entries[-1]
    return None


class _Chain:
    """Operations that compute one tensor from others, to be repeated on other values."""

    def __init__(self, starts: Sequence[Node], end: Node, ops: Iterable[Op]) -> None:
        self.starts, self.end, self.ops = starts, end, sorted(ops, key=_index)
        self.constants, self.given = dict[Node, Tensor](), list[Tensor]()

    @property
    def key(self) -> str:
        """The same text for chains with the same result."""
        numbers: dict[Node, int] = {}

        def plain(leaf: Any) -> Any:
            return (numbers.setdefault(leaf, len(numbers)), leaf.shape) if isinstance(leaf, Node) else leaf

        ops = [(op.name, op.args, op.kwargs, op.outputs) for op in self.ops]
        return repr(map_leaves([self.starts, ops, [self.end]], plain))

    def weighs_positions(self, weights: Node | None) -> bool | str:
        """Whether keys are positions. The end is the values, or their product with the result of a softmax."""
        try:
            size, used = self._used_keys(weights)
            if len(used) < 2:
                return "it attends to a single position of the example"
            keys = F.one_hot(used[sorted({0, 1, len(used) - 2, len(used) - 1})], size)
            # Without keys there may be a bias. Zeros that are normalized again are NaN.
            without = self._slopes(torch.zeros(size), weights) if weights else [torch.zeros(())] * len(self.starts)
            slopes = [[(a - b.nan_to_num()).abs() for a, b in zip(self._slopes(key, weights), without, strict=True)]
                      for key in keys]  # fmt: skip
        except Exception as error:
            return f"the way to its values cannot be repeated: {error}"
        # Less than this is rounding, as of a normalizer that is constant: the values themselves are about 1.
        least = 1e-6 * max(1.0, *(float(x.max()) for one in slopes for x in one))
        parts = [[x > least for x in one] for one in slopes]
        both = [(a, b) for one, other in itertools.combinations(parts, 2) for a, b in zip(one, other, strict=True)
                if a.any() and b.any()]  # fmt: skip
        if any(not torch.equal(a, b) for a, b in both):
            return True
        return False if both else "its keys are separate tensors, such as experts or time steps"

    def _used_keys(self, weights: Node | None) -> tuple[int, Tensor]:
        """Return the number of keys, and those that are no padding: a change of their weights changes the end."""
        if weights is None:
            return self.end.shape[-2], torch.arange(self.end.shape[-2])
        given = self.constants[weights] = torch.ones(weights.shape, dtype=self.end.dtype, requires_grad=True)
        (slope,) = torch.autograd.grad(self.computed()[1].sum(), given)
        return weights.shape[-1], slope.flatten(0, -2).any(0).nonzero().flatten()

    def _slopes(self, key: Tensor, weights: Node | None) -> Sequence[Tensor]:
        """Return the gradients of the sum of the values of one key, given as 0 and 1 for all keys."""
        key = key.to(self.end.dtype)
        if weights is not None:
            self.constants[weights] = key.expand(weights.shape).contiguous()
        given, end = self.computed()
        values = end * key.unsqueeze(-1) if weights is None else end
        return torch.autograd.grad(values.sum(), given, materialize_grads=True)

    def heads(self) -> Heads | str:
        """Return the heads in the last axis of the end, or why it has none."""
        if len({start.shape for start in self.starts}) > 1:
            return "products of different shapes are joined before it"
        try:
            self.result = self.computed()[1]
            # A head is some rows of the product, as the queries of several heads may be in one matrix, or, if the
            # rows are padded or pooled, a matrix (L, d).
            feature = torch.arange(self.end.shape[-1]) == 0
            for axes in [(-1,)] * self.has_rows(feature) + [(-2, -1)]:
                first = self.zeroed_with(feature, axes)
                if not first.all():
                    return self.layout(first, axes)
        except _NoHeadsError as error:
            return str(error)
        except Exception as error:
            return f"the way from attention to it cannot be repeated: {error}"
        return "it has a single head, or what mixes the heads comes before it"

    def slopes(self, features: Tensor) -> Sequence[Tensor]:
        """Return the gradients of the sum of some features."""
        chosen = self.result[..., features].float().sum()
        return torch.autograd.grad(chosen, self.given, retain_graph=True, materialize_grads=True)

    def has_rows(self, feature: Tensor) -> bool:
        """Whether a head has a row for each position, unlike learned queries and channels, which are one row each."""
        rows = sum(int((slope != 0).any(-1).sum()) for slope in self.slopes(feature))
        return rows >= self.end.size // self.end.shape[-1] and rows > self.end.shape[0]

    def zeroed_with(self, features: Tensor, axes: tuple[int, ...]) -> Tensor:
        """Zero the parts, of these axes, that some features depend on, and return which features are 0 then.

        A `_NoHeadsError` if these do not become 0, or if others change without becoming 0.
        """
        slopes = self.slopes(features)
        kept = [x.detach() * (slope == 0).all(axes, keepdim=True) for x, slope in zip(self.given, slopes, strict=True)]
        with torch.no_grad():
            end = self.repeat(kept)
        zero = (end == 0).flatten(0, -2).all(0)
        same = (end == self.result).flatten(0, -2).all(0)
        if not zero[features].all():
            raise _NoHeadsError("something is added to attention before it")
        if not (zero | same).all():
            raise _NoHeadsError("a norm or another function mixes the heads before it")
        return zero

    def layout(self, first: Tensor, axes: tuple[int, ...]) -> Heads:
        """Return the heads, given the features of the first one, or raise `_NoHeadsError` if they are not separate."""
        width, size = len(first), int(first.sum())
        features = torch.arange(width)
        for interleaved in (False, True):
            heads = Heads(width // size, interleaved)
            owner = features % heads.count if interleaved else features // size
            if width % size == 0 and torch.equal(owner == 0, first):
                break
        else:
            raise _NoHeadsError("the features of its heads are in no regular order")
        for bit in range(math.ceil(math.log2(heads.count))):
            for value in (0, 1):
                chosen = (owner >> bit & 1) == value
                if not torch.equal(self.zeroed_with(chosen, axes), chosen):
                    raise _NoHeadsError("its heads are not separate")
        return heads

    def computed(self) -> tuple[list[Tensor], Tensor]:
        """Return random numbers for the starts, and the end with its gradients."""
        if not self.given:
            self.given = [torch.rand(node.shape).add(0.5).to(node.dtype).requires_grad_() for node in self.starts]
        with torch.enable_grad():
            return self.given, self.repeat([one.clone() for one in self.given])

    def repeat(self, values: Sequence[Tensor]) -> Tensor:
        """Compute the end from other values of the starts."""
        return replay(self.ops, dict(zip(self.starts, values, strict=True)), self._constant)[self.end]

    def _constant(self, node: Node) -> Tensor:
        """Random numbers in place of other tensors, such as gates and the weights of norms, but the true sizes."""
        if node not in self.constants:
            values = torch.ones(node.shape)
            if node.op is not None and not (node.is_data or node.dtype.is_floating_point):
                values = replay([node.op], {}, self._constant)[node]
            elif node.dtype is torch.bool:  # a mask, in which either may mean masked
                values = torch.rand(node.shape) < 0.5
            elif node.dtype.is_floating_point:  # with small sums over features, so that no activation saturates
                values = torch.rand(node.shape).add(1.0).div(max(1, torch.Size(node.shape[1:]).numel()))
            self.constants[node] = values.to(node.dtype)
        return self.constants[node]

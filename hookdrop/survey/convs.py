"""Find the convolutions of a CNN in a trace: the layer after each, the blocks that they form, and the stages of blocks.

A block is found by its residual addition, or by its class if other blocks of this class have one. A norm is a module
that keeps the shape and whose weights are vectors. A gate (squeeze-excite, selective kernels) is computed from what it
multiplies, and its convolutions do not count.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from hookdrop.survey.ops import CATS, CONVS, ENLARGING, FUSED_ATTENTION, PARTS, PRODUCTS, VIEWS
from hookdrop.survey.residuals import Residual, added
from hookdrop.survey.trace import Call, Node, Op, Trace

_ATTENTION = PRODUCTS - {"linear"} | {FUSED_ATTENTION}
_LINEAR = CONVS | PARTS | ENLARGING | {"add", "mul", "pad", "dropout", "avg_pool2d", "max_pool2d"}
_GATES = {"sigmoid", "softmax", "hardsigmoid"}


@dataclass(frozen=True)
class ConvBlock:
    """A residual block, or a block of the same class without a skip, such as one that reduces the resolution."""

    name: str
    """Full name of the innermost module around it."""
    layers: tuple[str, ...]
    """Full names of the layers whose outputs follow its convolutions, and of a layer on its skip."""
    branch: str | None
    """For an identity skip without a layer: the first layer of the residual branch, relative to the block; empty if
    no hook can reach the skip. None without such a skip."""
    start: Node
    end: Node
    dilation: int

    @property
    def size(self) -> tuple[int, ...]:
        """The resolution of its output."""
        return self.end.shape[2:]


@dataclass
class ConvNet:
    """Blocks of which each takes the result of the one before."""

    blocks: list[ConvBlock]
    others: list[tuple[int, str]] = field(default_factory=list)
    """When other blocks run, and their names: residual blocks without convolutions, and convolutions between blocks."""

    @property
    def stages(self) -> list[list[ConvBlock]]:
        """Runs of blocks with one resolution, or in a dilated network one dilation, up to the first larger map."""
        stages: list[list[ConvBlock]] = []
        for block in self.blocks:
            run = stages[-1] if stages else []
            if run and block.size > run[-1].size:
                break
            if not run or block.size != run[-1].size:
                stages.append([block])
            elif block.dilation > max(before.dilation for before in run):
                # The first block of a dilated stage, which has more channels, may still have the previous dilation.
                count = next((i for i in range(len(run) - 1, 0, -1) if _widens(run[i])), len(run))
                first = [] if _widens(block) else run[count:]
                del run[len(run) - len(first) :]
                stages.append([*first, block])
            else:
                run.append(block)
        return stages

    def others_since(self, first: ConvBlock) -> list[str]:
        """Return the names of the other blocks that run in the stages since a block."""
        root = os.path.commonpath([block.name.replace(".", "/") for block in self.blocks]).replace("/", ".")
        last = self.blocks[-1].end.index
        later = [(when, name) for when, name in self.others if when > first.start.index]
        inside = [name for when, name in later if when < last or (root and name.startswith(f"{root}."))]
        return list(dict.fromkeys(inside))


def _widens(block: ConvBlock) -> bool:
    return block.start.shape[1] != block.end.shape[1]


class ConvGraph:
    """The flow of tensors through the convolutions of a model."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.takers: dict[Node, list[Call]] = {}
        own: dict[Call, list[Op]] = {}
        for op in trace.ops:
            if op.call is not None:
                own.setdefault(op.call, []).append(op)
        for call in trace.calls:
            for node in dict.fromkeys(call.inputs):
                self.takers.setdefault(node, []).append(call)
        self._norms = {call for call in trace.calls if _is_norm(call, own.get(call, []))}
        self._normed = {node for call in self._norms for node in call.outputs}
        self._normed |= {node for op in trace.ops if op.name.endswith("_norm") for node in op.outputs}

    def carriers(self, op: Op) -> list[Node]:
        """Return the inputs that an operation passes on: not a gate, nor an attention that is added."""
        inputs = [node for node in op.inputs if node.is_data]
        if len(inputs) != 2 or op.name not in ("add", "mul"):
            return inputs
        full = [node for node in inputs if node.shape == op.outputs[0].shape]
        if len(full) == 1:
            return full
        for kept, other in (inputs, inputs[::-1]):
            attends = op.name == "mul" or any(map(_attends, self.path(kept, other)))
            if attends and self.trace.leads(kept, other):
                return [kept]
        return inputs

    def path(self, start: Node, *ends: Node) -> list[Node]:
        """Return the tensors on the way, in the order of execution, without those that only compute gates."""
        return self.trace.path(start, ends, self.carriers)

    def convs(self, nodes: Iterable[Node]) -> list[Op]:
        """Return the convolutions with parameters that computed these tensors."""
        ops = [node.op for node in nodes if node.op is not None and node.op.name in CONVS]
        return [op for op in ops if op.argument(1, "weight").has_weights]

    def norm_after(self, node: Node) -> Call | None:
        """Return the call of a norm on this tensor."""
        return next((call for call in self.takers.get(node, ()) if call in self._norms), None)

    def has_norm(self, conv: Op) -> bool:
        """Whether a norm follows a convolution, or a norm and an activation come before it."""
        before = conv.inputs[0].op
        return self.norm_after(conv.outputs[0]) is not None or (
            before is not None and before.name not in VIEWS and before.inputs[0] in self._normed
        )

    def layer_after(self, conv: Op) -> Call | None:
        """Return the layer whose output follows a convolution: its norm, or itself before an activation or a sum.

        None if another convolution follows, as in a separable one, or if attention takes the result.
        """
        node, user, call = conv.outputs[0], None, conv.call
        while not (norm := self.norm_after(node)):
            users = self.trace.users.get(node, [])
            gated = [op for op in users if op.name == "mul" and len(op.inputs) == 2 and self.carriers(op) == [node]]
            user = gated[0] if gated else users[0] if len(users) == 1 else None
            if user is None or not (gated or user.name in CATS or (user.name in VIEWS and user.call is call)):
                break
            node = user.outputs[0]
        keeps = user is not None and user.outputs[0].shape == node.shape and user.name not in CONVS | _GATES
        return norm or (call if keeps and call is not None and node in call.outputs else None)

    def follows(self, conv: Op) -> tuple[bool, bool]:
        """Whether a norm, and whether an activation, follows a convolution, or precedes it where a sum follows."""
        node, has_norm = conv.outputs[0], False
        while True:
            users = self.trace.users.get(node, [])
            product = next((op for op in users if op.name == "mul" and len(users) == 2), None)
            user = users[0] if len(users) == 1 else None
            if user is None:
                return has_norm, product is not None
            if user.outputs[0] in self._normed:  # it may be an operation of a module that also activates
                has_norm, node = True, user.outputs[0]
            elif norm := self.norm_after(node):
                has_norm, node = True, norm.outputs[0]
            elif user.name in VIEWS | CATS or (user.name == "add" and len(self.carriers(user)) == 1):
                node = user.outputs[0]
            elif user.name == "add" and not has_norm:
                return self.has_norm(conv), self.has_norm(conv)
            else:
                same = user.outputs[0].shape == node.shape and len([one for one in user.inputs if one.is_data]) == 1
                return has_norm, same and user.name not in _LINEAR | _GATES

    def layers(self, path: Collection[Node]) -> list[Call]:
        """Return the layers after the convolutions on a path, without those that compute queries, keys and values."""
        cores = [node.op for node in path if node.op is not None and _attends(node)]
        found = dict.fromkeys(layer for conv in self.convs(path) if (layer := self.layer_after(conv)))
        return [layer for layer in found if not any(self._is_near(layer.outputs[0], core) for core in cores)]

    def _is_near(self, node: Node, core: Op) -> bool:
        """Whether a tensor leads to an operation without another convolution."""
        path = self.trace.path(node, core.inputs)
        return self.trace.leads(node, core.outputs[0]) and CONVS.isdisjoint(_names(path))


def _attends(node: Node) -> bool:
    """Whether a tensor is a product of matrices that both depend on the example."""
    return node.op is not None and node.op.name in _ATTENTION and sum(one.is_data for one in node.op.inputs) > 1


def _names(path: Iterable[Node]) -> list[str]:
    """Return the names of the operations that computed these tensors."""
    return [node.op.name for node in path if node.op is not None]


def _is_norm(call: Call, own: Collection[Op]) -> bool:
    """Whether a module normalizes. A gain has one vector of weights, a norm has more, or calls PyTorch's function."""
    inputs, outputs = call.inputs, call.outputs
    if not own or not inputs or len(outputs) != 1 or outputs[0].shape != inputs[0].shape:
        return False
    weights = {node for op in own for node in op.inputs if node.leaf and not node.is_data}
    are_vectors = all(max(node.shape, default=1) == node.size for node in weights)
    per_channel = [node for node in weights if node.size > 1]
    return are_vectors and (len(per_channel) > 1 or any(op.name.endswith("_norm") for op in own))


def conv_nets(trace: Trace, residuals: Iterable[Residual]) -> list[ConvNet]:
    """Return the networks of blocks in a model, which may have several, such as two backbones."""
    graph = ConvGraph(trace)
    maps = [one for one in residuals if len(one.output.shape) > 2]
    skips = {one: {*_names(graph.path(one.root, one.skip))} for one in maps}
    # A skip may be a part of a tensor, as in a DPN.
    whole = [one for one, names in skips.items() if not names or not names <= PARTS]
    paths = {one: graph.path(one.root, *one.op.inputs) for one in whole}
    blocks = [block for one in _outermost(graph, paths) if (block := _residual_block(graph, one, paths)) is not None]
    if blocks or not paths:
        blocks += _blocks_without_skip(graph, blocks)
    blocks.sort(key=lambda block: block.end.index)
    spans = [(block.start.index, block.end.index) for block in blocks]
    ends = {block.end for block in blocks}
    others = [
        (one.op.index, one.op.call.name)
        for one, path in paths.items()
        if one.op.call and ends.isdisjoint((one.output, *path)) and not any(a < one.op.index < b for a, b in spans)
    ]
    nets: list[ConvNet] = []
    for block in blocks:
        leading = [net for net in nets if any(graph.trace.leads(before.end, block.end) for before in net.blocks)]
        net = next((net for net in reversed(leading) if graph.trace.leads(net.blocks[-1].end, block.end)), None)
        if net is None:
            nets.append(ConvNet([block], [*others]))
            for parallel in leading:
                parallel.others.append((block.start.index, block.name))
            continue
        between = graph.convs(graph.path(net.blocks[-1].end, block.start))
        unknown = [conv for conv in between if graph.norm_after(conv.outputs[0]) and conv.call]
        if len(unknown) > (net.blocks[-1].size != block.size):  # one convolution may lead to the next stage
            net.others += [(conv.index, conv.call.name) for conv in unknown if conv.call]
        net.blocks.append(block)
    return nets


def _outermost(graph: ConvGraph, paths: Mapping[Residual, list[Node]]) -> list[Residual]:
    """Leave out the additions inside a block, and those around several blocks."""
    ends = {one.output: one for one in paths}
    single = []
    for one, path in paths.items():
        inner = [ends[node] for node in path if node in ends]
        if sum(not each.is_projection and len(graph.convs(paths[each])) > 1 for each in inner) < 2:
            single.append(one)
    inside = {node for one in single for node in paths[one]}
    return [one for one in single if one.output not in inside]


def _residual_block(graph: ConvGraph, one: Residual, paths: Mapping[Residual, list[Node]]) -> ConvBlock | None:
    """Return the block of a residual addition, or None if it is not one of convolutions and norms."""
    path, call, skip = paths[one], one.op.call, one.skip
    layers = _layers(graph, path)
    if call is None or not layers or any(layer.start > one.op.index for layer in layers):
        return None
    around = [outer for outer in call.around() if one.root in outer.inputs]
    block, branch, names = around[0] if around else call, None, [layer.name for layer in layers]
    while inner := next((each for each in paths if each.output is skip and each.root is one.root), None):
        skip = inner.skip
    if not graph.convs(graph.path(one.root, skip)):
        module = _skip_module(graph, one, block, skip)
        names += filter(None, [module])
        branch = None if module else _branch(graph, one, skip, block) if around else ""
    dilation = _dilation(graph.convs(path))
    return ConvBlock(block.name, tuple(dict.fromkeys(names)), branch, one.root, one.output, dilation)


def _layers(graph: ConvGraph, path: Collection[Node]) -> list[Call]:
    """Return the layers after the convolutions of a block; none if it does not consist of convolutions and norms."""
    layers, is_mixed = graph.layers(path), "linear" in _names(path)
    return layers if len(layers) > 1 and not is_mixed and any(map(graph.has_norm, graph.convs(path))) else []


def _skip_module(graph: ConvGraph, one: Residual, block: Call, skip: Node) -> str:
    """Return the last module on a skip without a convolution: a pooling, a norm, or an Identity after the branch."""
    calls = [call for call in graph.trace.calls if block.start < call.start < one.op.index]
    if skip is one.root:
        users = [op.index for op in graph.trace.users[skip] if op.index < one.op.index]
        started = max(users, default=block.start)
        return next((call.name for call in calls if skip in call.outputs and call.start > started), "")
    on_skip = (call.name for node in reversed(graph.path(one.root, skip)) for call in calls if node in call.outputs)
    return next(on_skip, "")


def _branch(graph: ConvGraph, one: Residual, skip: Node, block: Call) -> str:
    """Return the layer that alone takes the tensor of an identity skip, by its name in the block."""
    calls = [call for call in graph.takers.get(one.root, ()) if block.start < call.start and call.end < one.op.index]
    outermost = [call for call in calls if call.parent not in calls]
    takers = [call for call in outermost if one.root not in call.outputs]
    skipping = {*graph.path(one.root, skip)}  # a skip of functions: padding
    users = [op for op in graph.trace.users[one.root] if block.start < op.index < one.op.index]
    branching = [op for op in users if skipping.isdisjoint(op.outputs)]
    prefix = f"{block.name}." if block.name else ""
    alone = len(takers) == 1 and all(takers[0].start < op.index < takers[0].end for op in branching)
    return takers[0].name.removeprefix(prefix) if alone and takers[0].name.startswith(prefix) else ""


def _blocks_without_skip(graph: ConvGraph, known: list[ConvBlock]) -> list[ConvBlock]:
    """Return modules of the classes of the known blocks; without any, modules of classes that follow one another."""
    names = {block.name for block in known}
    types = {call.type for call in graph.trace.calls if call.name in names}
    found = {}
    for call in graph.trace.calls:
        inputs, outputs = [node for node in call.inputs if node.is_data], call.outputs
        is_other = any(around.name in names for around in call.around()) or (known and call.type not in types)
        if is_other or len(inputs) != 1 or len(outputs) != 1 or len(outputs[0].shape) < 3:
            continue
        path = graph.path(inputs[0], outputs[0])
        convs, layers = graph.convs(path), graph.layers(path) if known else _layers(graph, path)
        if layers and (known or len(layers) == len(convs)):
            names_of = tuple(layer.name for layer in layers)
            found[call] = ConvBlock(call.name, names_of, None, inputs[0], outputs[0], _dilation(convs))
    if known:
        return list(found.values())
    outer = {around for call in found for around in call.around() if around is not call}
    counts = Counter(call.type for call in found if call not in outer)
    blocks = [block for call, block in found.items() if call not in outer and counts[call.type] > 1]
    in_a_row = all(graph.trace.leads(before.end, block.end) for before, block in pairwise(blocks))
    return blocks if in_a_row else []


def _dilation(convs: Iterable[Op]) -> int:
    values = [op.argument(5, "dilation", 1) for op in convs if op.name not in ENLARGING]
    return max((max(value) if isinstance(value, tuple | list) else value for value in values), default=1)


def pyramid_levels(trace: Trace) -> list[str]:
    """Return the convolutions whose outputs are the levels of a feature pyramid: of sums with enlarged maps."""
    enlarged = {node: op.inputs[0] for op in trace.ops if op.name in ENLARGING for node in op.outputs}
    sums = [op for op in trace.ops if added(op) and any(node in enlarged for node in op.inputs)]
    levels = {node for op in sums for node in op.outputs}
    levels |= {enlarged[node] for op in sums for node in op.inputs if node in enlarged}
    convs = [op for op in trace.ops if op.name in CONVS and op.inputs[0] in levels and not _is_pointwise(op)]
    return list(dict.fromkeys(op.call.name for op in convs if op.call))


def map_convs(trace: Trace) -> tuple[list[str], tuple[str, ...]]:
    """Return the convolutions on the way to the output that a norm or an activation follows, and the backbones.

    A pointwise convolution needs both: others are projections of skips and gates. Those after a global pooling and
    those of the output do not count. A backbone is given by the prefix of the names of its layers.
    """
    graph = ConvGraph(trace)
    start = next((node for node in trace.inputs if len(node.shape) > 2), None)
    if start is None:
        return [], ()
    path = graph.path(start, *(node for node in trace.outputs if len(node.shape) > 2))
    pooled = _after_pooling(path)
    direct = trace.path(start, trace.outputs, lambda op: () if op.name in CONVS else graph.carriers(op))
    names = []
    for conv in graph.convs(path):
        has_norm, is_activated = graph.follows(conv)
        is_kept = has_norm and is_activated if _is_pointwise(conv) else has_norm or is_activated
        if is_kept and conv.outputs[0] not in direct and conv.inputs[0] not in pooled and conv.call:
            names.append(conv.call.name)
    return list(dict.fromkeys(names)), tuple(f"{call.name}." for call in _backbones(graph, start))


def _is_pointwise(conv: Op) -> bool:
    return set(conv.argument(1, "weight").shape[2:]) == {1}


def _after_pooling(path: Iterable[Node]) -> set[Node]:
    """Return the tensors after a global pooling, until they are enlarged."""
    pooled: set[Node] = set()
    for node, op in ((node, node.op) for node in path if node.op is not None):
        if "adaptive" in op.name or (op.inputs[0] in pooled and node.shape[2:] <= op.inputs[0].shape[2:]):
            pooled.add(node)
    return pooled


def _backbones(graph: ConvGraph, start: Node) -> Iterator[Call]:
    """Yield the modules that reduce an image to an eighth or less, and begin with it in their first convolution."""
    for call in graph.trace.calls[1:]:
        maps = [node for node in call.outputs if len(node.shape) > 2]
        image = next((node for node in call.inputs if node is start or graph.trace.leads(start, node)), None)
        if image is None or not maps or 8 * maps[-1].shape[-1] > start.shape[-1] or image.shape[2:] != start.shape[2:]:
            continue
        inside = graph.path(image, *maps)
        convs = graph.convs(inside)
        if convs and ENLARGING.isdisjoint(_names(inside)) and convs[0].outputs[0].shape[-1] < start.shape[-1]:
            yield call

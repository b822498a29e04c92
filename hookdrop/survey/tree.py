"""The layers of a model as a tree, with what fits each, folded where blocks repeat."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Any

from torch import nn

from hookdrop.survey.branches import has_weights
from hookdrop.survey.convs import ConvGraph, conv_nets
from hookdrop.survey.facts import Survey
from hookdrop.survey.heads import Heads
from hookdrop.survey.tokens import find_patches
from hookdrop.utils.select import Layer, has_forward
from hookdrop.utils.tables import html_table, shape_text, text_table

_HEADER = ("layer", "type", "shape", "calls", "what fits")
_RECIPES = {
    "DropPath, ": "stochastic_depth(p=0.1)",
    "LayerDrop: ": "layer_drop(p=0.1)",
    "HeadDropout: ": "head_dropout(p=0.1)",
    "DropKey: ": "drop_key(p=0.1)",
    "NEFTune: ": "neftune(alpha=5)",
    ": block with ": "dropblock_resnet(p=0.1, block_size=7)",
}
"""The recipes that may choose all layers of a kind, by a part of what fits. One may refuse a model; `plan` says why."""


@dataclass(frozen=True)
class LayerFacts:
    """One layer of a model."""

    name: str
    """Full name, without wrappers."""
    type: str
    shape: tuple[int, ...] | None = None
    """Of the first floating-point tensor that it returns; like `calls`, None without an example."""
    calls: int | None = None
    """How often one forward calls it; None for containers, which have no forward."""
    fits: tuple[str, ...] = ()
    """What can be added there, such as `"DropBlock, Dropout2d: 256 maps of 14x14"`."""
    rates: tuple[float, ...] = ()
    """The rates at which it already drops."""


class Layers(list[LayerFacts]):
    """The selected layers, in `named_modules()` order. `print` shows a tree, in which equal blocks are one."""

    def __init__(self, every: Sequence[LayerFacts], selected: Collection[str], title: str) -> None:
        super().__init__(one for one in every if one.name in selected)
        self._title, self._root = title, _tree(every)
        fits = {fit for one in self for fit in one.fits}
        taken = {fit for one in self if one.rates for fit in one.fits}  # the model drops there already
        fitting = {
            part: any(part in fit for fit in fits) and not any(part in fit for fit in taken) for part in _RECIPES
        }
        recipes = [recipe for part, recipe in _RECIPES.items() if fitting[part]]
        recipes += ["set_dropout()"] * any(one.rates for one in self)
        self._notes = [f"recipes to try with plan: {', '.join(recipes)}"] if recipes else []

    def _table(self) -> tuple[list[str], list[list[Any]]]:
        names, rows = {one.name for one in self}, []
        for pattern, depth, equal in _rows([self._root], "", 0):
            if names.isdisjoint(one.facts.name for one in equal):
                continue
            one, rates = equal[0].facts, sorted(rate for each in equal for rate in each.facts.rates)
            limits = dict.fromkeys(f"{rate:.3g}" for rate in (*rates[:1], *rates[-1:]))
            fits = [f"already drops {' to '.join(limits)}", *one.fits] if rates else one.fits
            kind = one.type if len(equal) == 1 else f"{one.type} (x {len(equal)})"
            name, shape = "  " * depth + (pattern or "(the model)"), "" if one.shape is None else shape_text(one.shape)
            rows.append([name, kind, shape, "" if one.calls is None else one.calls, "; ".join(fits)])
        used = [i for i in range(len(_HEADER)) if any(row[i] != "" for row in rows)]
        return [_HEADER[i] for i in used], [[row[i] for i in used] for row in rows]

    def __repr__(self) -> str:
        return "\n".join([self._title, text_table(*self._table()), *self._notes])

    def _repr_html_(self) -> str:
        header, rows = self._table()
        indented = [[row[0].replace("  ", "\u2003"), *row[1:]] for row in rows]
        return html_table(header, indented, self._title, self._notes)


# --- folding


@dataclass
class _Node:
    facts: LayerFacts
    inside: list[_Node] = field(default_factory=list)

    @property
    def own_name(self) -> str:
        return self.facts.name.rpartition(".")[2]

    @property
    def kind(self) -> Any:
        """Equal for blocks that differ only in their rates."""
        one = self.facts
        return one.type, one.shape, one.calls, one.fits, bool(one.rates), [(x.own_name, x.kind) for x in self.inside]


def _tree(every: Sequence[LayerFacts]) -> _Node:
    nodes = {one.name: _Node(one) for one in every}
    for name, node in nodes.items():
        if name:
            nodes[name.rpartition(".")[0]].inside.append(node)
    return nodes[""]


def _rows(equal: list[_Node], pattern: str, depth: int) -> Iterator[tuple[str, int, list[_Node]]]:
    """Yield a pattern, its depth and the layers that it matches, for equal blocks and for what is inside them."""
    yield pattern, depth, equal
    inside, depth = equal[0].inside, depth + bool(equal[0].facts.name)
    for _, group in groupby(range(len(inside)), lambda i: inside[i].kind if inside[i].own_name.isdecimal() else i):
        indices = list(group)
        for own, part in _patterns([inside[i].own_name for i in indices], len(indices) == len(inside)):
            members = [block.inside[i] for block in equal for i in indices if inside[i].own_name in part]
            yield from _rows(members, f"{pattern}.{own}" if pattern else own, depth)


def _patterns(names: list[str], are_all: bool) -> Iterator[tuple[str, list[str]]]:
    """Yield globs, each with the names that it matches: `*` for all, `[1-5]`, or for many also `1[0-7]`."""
    if are_all and len(names) > 1:
        yield "*", names
        return
    for tens, part in groupby(names, lambda name: name[:-1] if name.isdecimal() else name):
        found = list(part)
        yield (found[0] if len(found) == 1 else f"{tens}[{found[0][-1]}-{found[-1][-1]}]"), found


# --- what fits


def layer_facts(layers: Sequence[Layer], survey: Survey | None) -> list[LayerFacts]:
    """Return the facts of all layers; without a survey, only their types."""
    if survey is None:
        return [LayerFacts(layer.name, type(layer.module).__name__) for layer in layers]
    offers: dict[str, dict[str, str]] = {}
    for find in (_maps, _branches, _attention, _tokens, _features):
        for name, text in find(survey):
            offers.setdefault(name, {}).setdefault(text.partition(":")[0], text)  # the first call counts
    modules, rates = {layer.name: layer.module for layer in layers}, dict[str, list[float]]()
    for rate in survey.drop_rates.rates:
        value = float(attrgetter(rate.attribute)(modules[rate.layer]))
        rates.setdefault(rate.layer, []).extend([value] if value > 0 else [])
    return [_facts(one, survey, [*offers.get(one.name, {}).values()], rates.get(one.name, [])) for one in layers]


def _facts(layer: Layer, survey: Survey, offers: list[str], rates: list[float]) -> LayerFacts:
    module, calls = layer.module, survey.layers.get(layer.name, [])
    shapes = [node.shape for call in calls[-1:] for node in call.outputs if node.fits]
    count = len(calls) if has_forward(module) else None
    if count and isinstance(module, nn.RNNBase):
        offers = [*offers, "LockedDropout: time steps", 'Dropout, at="parameters": weight_hh_*']
    if count == 0:
        offers = [*offers, "never called"]
    return LayerFacts(layer.name, type(module).__name__, next(iter(shapes), None), count, tuple(offers), tuple(rates))


def _maps(survey: Survey) -> Iterator[tuple[str, str]]:
    """Yield layers after convolutions, and blocks of convolutions."""
    graph = ConvGraph(survey.trace)
    layers = [graph.layer_after(conv) for conv in graph.convs(node for op in survey.trace.ops for node in op.outputs)]
    blocks = [block for net in conv_nets(survey.trace, survey.residuals) for block in net.blocks]
    maps = [(layer.name, node.shape, "") for layer in layers if layer is not None for node in layer.outputs]
    for name, (_, channels, *size), what in [*maps, *((one.name, one.end.shape, "block with ") for one in blocks)]:
        if min(size) > 3:
            yield name, f"DropBlock, Dropout{len(size)}d: {what}{channels} maps of {shape_text(size)}"
        elif max(size) > 1:  # too small for blocks
            yield name, f"Dropout{len(size)}d: {channels} maps of {shape_text(size)}"


def _branches(survey: Survey) -> Iterator[tuple[str, str]]:
    for branch in survey.branches:
        yield branch.end, "DropPath, Dropout: end of a residual branch"
    for name, reason in survey.skippable.items():
        if not reason:
            yield name, "LayerDrop: its input plus residual branches"


def _attention(survey: Survey) -> Iterator[tuple[str, str]]:
    for name, heads in survey.heads.items():
        if isinstance(heads, Heads):
            yield name, f"HeadDropout: {heads.count} heads"
    for name, shapes in survey.scores.items():
        for shape in shapes:
            yield name, f"DropKey: attention to {shape[-1]} keys"


def _tokens(survey: Survey) -> Iterator[tuple[str, str]]:
    if survey.token_embedding is not None:
        yield survey.token_embedding, "NEFTune: token embedding"
    keys = {shape[-1] for shapes in survey.scores.values() for shape in shapes}
    layer = find_patches(survey.trace)
    for node in survey.layers[layer][-1].outputs if layer else ():
        if layer and keys == {node.shape[1]}:  # attention between all tokens, and not between those of a window
            yield layer, f"TokenDropout: {node.shape[1]} tokens"


def _features(survey: Survey) -> Iterator[tuple[str, str]]:
    """Yield the layer with weights that returns the output of the model, such as a classifier."""
    outputs = {*survey.trace.calls[0].outputs}
    for op in survey.trace.ops:
        call = op.call
        if call and call.parent and has_weights(op) and not outputs.isdisjoint(call.outputs):
            shape = call.inputs[0].shape if call.inputs else ()
            if len(shape) == 2:
                yield call.name, f'Dropout, at="input": {shape[1]} features'

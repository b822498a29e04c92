"""The layers of a model as a tree, with what fits each."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from hookdrop.core import compiling
from hookdrop.core.arguments import named_arguments
from hookdrop.core.errors import HookdropError, InjectionError
from hookdrop.core.plan import make_plan
from hookdrop.core.registry import hooks_removed
from hookdrop.core.selection import Entries, Layer, has_forward, named_layers, overrides_call, select, unwrapped
from hookdrop.core.spec import InjectionSpec
from hookdrop.core.tables import html_table, shape_text, text_table
from hookdrop.survey.convs import ConvGraph, conv_nets
from hookdrop.survey.facts import Survey, survey
from hookdrop.survey.folding import SIZES, LayerFacts, fold
from hookdrop.survey.heads import Heads, Scores
from hookdrop.survey.layers import find_predictions
from hookdrop.survey.tokens import find_patches

_HEADER = ("layer", "type", "shape", "calls", "what fits")


class Layers(list[LayerFacts]):
    """The selected layers, in `named_modules()` order. `print` shows a tree, in which equal blocks are one."""

    def __init__(
        self, every: Sequence[LayerFacts], selected: Collection[str], title: str, recipes: Sequence[str] = ()
    ) -> None:
        super().__init__(one for one in every if one.name in selected)
        self._title, self._rows = title, fold(every, selected)
        self._notes = [f"recipes to try with plan: {', '.join(recipes)}"] if recipes else []

    def _table(self) -> tuple[list[str], list[list[Any]]]:
        rows: list[list[Any]] = []
        for row in self._rows:
            one, rates = row.layers[0], sorted(rate for each in row.layers for rate in each.rates)
            limits = dict.fromkeys(f"{rate:.3g}" for rate in (*rates[:1], *rates[-1:]))
            fits = [f"already drops {' to '.join(limits)}"] * bool(rates)
            fits += map(_range, zip(*[each.fits for each in row.layers], strict=True))
            kind = one.type if len(row.layers) == 1 else f"{one.type} (x {len(row.layers)})"
            name, shapes = "  " * row.depth + (row.pattern or "(the model)"), [each.shape for each in row.layers]
            shape = "" if one.shape is None else _range([*map(shape_text, shapes)])
            rows.append([name, kind, shape, "" if one.calls is None else one.calls, "; ".join(fits)])
        used = [i for i in range(len(_HEADER)) if any(row[i] != "" for row in rows)]
        return [_HEADER[i] for i in used], [[row[i] for i in used] for row in rows]

    def __repr__(self) -> str:
        return "\n".join([self._title, text_table(*self._table()), *self._notes])

    def _repr_html_(self) -> str:
        header, rows = self._table()
        indented = [[row[0].replace("  ", "\u2003"), *row[1:]] for row in rows]
        return html_table(header, indented, self._title, self._notes)


def _range(texts: Sequence[str]) -> str:
    """Return one text for texts that differ in sizes: `64 to 512 maps of 7x7 to 56x56`."""
    parts = []
    for column in zip(*map(SIZES.split, texts), strict=True):
        values = sorted({*column}, key=lambda text: [int(size) if size.isdecimal() else 0 for size in text.split("x")])
        parts.append(" to ".join([*values[:1], *values[1:][-1:]]))
    return "".join(parts)


# --- what fits


def layer_facts(layers: Sequence[Layer], survey: Survey | None) -> list[LayerFacts]:
    """Return the facts of all layers; without a survey, only their types."""
    if survey is None:
        return [LayerFacts(layer.name, type(layer.module).__name__) for layer in layers]
    offers: dict[str, dict[str, str]] = {}
    for find in (_maps, _branches, _attention, _tokens, _features):
        for name, text in find(survey):
            offers.setdefault(name, {}).setdefault(text.partition(":")[0], text)  # the first call counts
    rates = [(rate.layer, rate.value_in(survey.model)) for rate in survey.drop_rates.rates]
    found = []
    for name, module in ((layer.name, layer.module) for layer in layers):
        calls, fits = survey.layers.get(name, []), [*offers.get(name, {}).values()]
        shapes = [node.shape for call in calls[-1:] for node in call.outputs if node.fits]
        count = len(calls) if has_forward(module) else None
        if count and isinstance(module, nn.RNNBase):
            fits += ["LockedDropout: time steps", 'Dropout, at="parameters": weight_hh_*']
        if count == 0:
            scripted = isinstance(module, torch.jit.ScriptModule)
            why = "compiled by torch.jit" if scripted else "overrides __call__" if overrides_call(module) else ""
            fits.append(f"{why}, so hooks never run" if why else "never called")
        own = tuple(value for layer, value in rates if layer == name and value > 0)
        found.append(LayerFacts(name, type(module).__name__, next(iter(shapes), None), count, tuple(fits), own))
    return found


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
    for name, scores in survey.scores.items():
        if isinstance(scores, Scores):  # a function that hides them has no shapes
            for keys in [f" to {shape[-1]} keys" for shape in scores.shapes] or [""]:
                yield name, f"DropKey: attention{keys}"


def _tokens(survey: Survey) -> Iterator[tuple[str, str]]:
    for name in filter(None, survey.token_embeddings[:1]):
        yield name, "NEFTune: token embedding"
    scores = [one for one in survey.scores.values() if isinstance(one, Scores)]
    keys = {shape[-1] for one in scores for shape in one.shapes}
    layer = find_patches(survey.trace)
    for node in survey.layers[layer][-1].outputs if layer else ():
        if layer and keys == {node.shape[1]}:  # attention between all tokens, and not between those of a window
            yield layer, f"TokenDropout: {node.shape[1]} tokens"


def _features(survey: Survey) -> Iterator[tuple[str, str]]:
    """Yield the layers that compute the predictions of the model, such as a classifier."""
    for name in dict.fromkeys(find_predictions(survey.trace).values()):
        shape = survey.layers[name][-1].inputs[0].shape
        if len(shape) == 2:
            yield name, f'Dropout, at="input": {shape[1]} features'


@named_arguments
def layers(model: nn.Module, example_input: Any = None, *, only: Entries | None = None) -> Layers:
    """Show the layers of a model, and what fits each: what a forward of the example does there.

    Printing the result shows a tree, in which equal blocks are one row, such as `blocks.*.mlp`. Each entry of its first
    column can be copied to `inject(model, ..., layers=...)`. The model does not change.

    Args:
        model: any `nn.Module`, wrapped or not.
        example_input: a tensor, a tuple of arguments or a dict of keyword arguments. None uses the input size of timm,
            the `dummy_inputs` of transformers, or an assumed image; without any of them, only names and types are
            shown.
        only: the layers to show; takes the same entries as `layers` of `inject`. None shows all of them, and the model
            itself if something fits it, or if it is one layer.

    Returns:
        A list of one entry for each layer, with `name`, `type`, `shape`, `calls`, `fits` and `rates`.

    Raises:
        InjectionError: the model does not run on `example_input`.
        LayerError: an entry of `only` matches nothing.

    Example:
        >>> conv, linear = nn.Conv2d(3, 8, 3), nn.Linear(8 * 36, 10)
        >>> model = nn.Sequential(conv, nn.ReLU(), nn.Flatten(), linear)
        >>> layers(model, torch.zeros(2, 3, 8, 8))
        layers of Sequential, example: example_input (2, 3, 8, 8) float32
        layer  type     shape    calls  what fits
        -----  -------  -------  -----  -----------------------------------
        0      Conv2d   2x8x6x6      1  DropBlock, Dropout2d: 8 maps of 6x6
        1      ReLU     2x8x6x6      1
        2      Flatten  2x288        1
        3      Linear   2x10         1  Dropout, at="input": 288 features
    """
    compiling.raise_if_tracing("layers()")
    known = named_layers(model) if only is None else select(model, only, source="`only`").layers
    found: Survey | None = None
    with hooks_removed(model):
        with suppress(*[InjectionError] * (example_input is None)):
            found = survey(model, example_input)
        every = layer_facts(named_layers(model), found)
    if only is None and len(every) > 1 and not every[0].fits:
        known = known[1:]
    chosen, recipes = {layer.name: layer.module for layer in known}, list[str]()
    example = "pass example_input=x for shapes, calls and what fits"
    if found is not None:
        example, recipes = f"example: {found.example.source}", _recipes_to_try(model, example_input, {*chosen.values()})
    return Layers(every, chosen, f"layers of {type(unwrapped(model)).__name__}, {example}", recipes)


_TO_TRY = (
    ("dropblock_detector(p=0.1, parts='both')", "dropblock_unet(p=0.1)", "dropblock_resnet(p=0.1, block_size=7)"),
    *(("stochastic_depth(p=0.1)",), ("layer_drop(p=0.1)",), ("head_dropout(p=0.1)",), ("drop_key(p=0.1)",)),
    *(("neftune(alpha=5)",), ("set_dropout()",)),
)
"""Recipes for `layers` to plan; of several for one purpose the first that fits, the most special first. Not
`patch_dropout`, whose plan runs the model with values."""


def _recipes_to_try(model: nn.Module, example: Any, chosen: Collection[nn.Module]) -> list[str]:
    """Return the recipes whose plan has a site among the chosen layers with a rate above 0."""
    found = []
    for texts in _TO_TRY:
        for text in texts:
            with suppress(HookdropError, ValueError):
                sites = make_plan(model, InjectionSpec(text), example_input=example).sites
                if any(site.p and site.module in chosen for site in sites):
                    found.append(text)
                    break
    return found

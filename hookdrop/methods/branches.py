"""Recipes for residual branches and the layers around them: stochastic depth, LayerDrop, dropout in transformers."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from hookdrop.core.errors import InjectionError, LayerError
from hookdrop.core.recipe import Recipe, RecipeSite
from hookdrop.core.selection import named_layers, unregistered
from hookdrop.core.tables import counted, some
from hookdrop.regularizers import Dropout, DropPath, LayerDrop
from hookdrop.survey.branches import Branch
from hookdrop.survey.facts import Survey
from hookdrop.survey.heads import attention_cores
from hookdrop.survey.ops import CONVS, PRODUCTS
from hookdrop.survey.residuals import has_weights


@dataclass(frozen=True)
class stochastic_depth(Recipe):
    """DropPath at the end of each residual branch, so that a sample skips the whole branch.

    The rate grows from 0 at the first block to `p` at the last: `inject(..., p_scale="depth")` starts above 0 as in the
    paper, `"equal"` uses `p` in every block, and `lambda name, i, n: i / n` is that of both libraries' EfficientNets.
    Huang et al. 2016, arXiv:1603.09382, section 3. Running the model shows the branches: all additions of a tensor and
    of what layers compute from it, apart from skips around several blocks, as in a U-Net.

    Args:
        p: drop probability of the last block.
        mode: `"row"` draws for each sample, and skips branches in which the samples are unknown, such as those of
            packed images; `"batch"` draws once for the whole batch, in these layers too. `"subset"` runs each branch on
            a part of the batch, which saves time (see `DropPath`), if the branches are modules without batch norm.

    Raises:
        LayerError: the model has no residual branch that ends with a module, or the samples are unknown in all; or,
            with `mode="subset"`, a branch is not a module, or has batch norm.
        InjectionError: the model already has stochastic depth, or two blocks share a module.

    Example:
        >>> import torchvision
        >>> drop = inject(torchvision.models.resnet18(), stochastic_depth(p=0.2))
        >>> [(site.name, round(site.p, 3)) for site in drop.sites][-2:]
        [('layer4.0.bn2', 0.171), ('layer4.1.bn2', 0.2)]
    """

    p_scale: ClassVar[str | None] = "depth_from_zero"

    p: float = 0.1
    mode: str = "row"

    def __post_init__(self) -> None:
        DropPath(self.p, self.mode)

    def sites(self, model: nn.Module, survey: Survey) -> Sequence[RecipeSite]:
        branches = _require_branches(self, model, survey)
        _check_no_stochastic_depth(model, survey)
        refusals = {branch: self._refusal(survey, branch) for branch in branches}
        if all(refusals.values()):
            raise LayerError(
                f"stochastic_depth cannot drop any residual branch of {type(model).__name__}. The first ends at "
                f"{branches[0].end!r}: {refusals[branches[0]]}."
            )
        chosen = [branch for branch, reason in refusals.items() if not reason]
        return [RecipeSite(self._site(model, one), DropPath(self.p, self.mode), group=one.layer) for one in chosen]

    def _refusal(self, survey: Survey, branch: Branch) -> str:
        """Return why a branch cannot be dropped; empty if it can."""
        inputs = [node for call in survey.layers.get(branch.layer, []) for node in call.inputs if node.fits]
        if inputs and len(inputs[0].shape) > len(branch.shape) and inputs[0].size > math.prod(branch.shape):
            return "the layer has several residual streams"
        if self.mode != "batch" and isinstance(found := survey.samples(branch.end), str):
            return f'the samples are unknown there (mode="batch" includes it): {found}'
        return ""

    def _site(self, model: nn.Module, branch: Branch) -> str:
        if self.mode != "subset":
            return branch.end
        for name in branch.parts:
            if any(True for child in model.get_submodule(name).children() for _ in child.parameters()):
                return name
        raise LayerError(
            f"stochastic_depth: mode='subset' needs branches that are modules, and the one of {branch.layer!r} that "
            f'ends at {branch.end!r} is not.\n  use mode="row"'
        )

    def groups(self, model: nn.Module, survey: Survey, sites: Sequence[RecipeSite]) -> Sequence[str]:
        # Blocks without a skip, such as those of an EfficientNet that change the shape, count too.
        every = set(_like(survey, super().groups(model, survey, sites)))
        return [name for name in survey.layers if name in every]

    def warnings(self, model: nn.Module, survey: Survey, sites: Sequence[RecipeSite]) -> Sequence[str]:
        groups = {site.group for site in sites}
        # Where a layer has sites at other branches, the end of the branch says which one is left out.
        named = [(branch, branch.end if branch.layer in groups else branch.layer) for branch in survey.branches]
        reasons = [(self._refusal(survey, branch), name) for branch, name in named]
        alone = [_ALONE.format(branch.end) for branch in survey.branches if branch.is_all]
        return [*alone[:1], *_skipped_warnings(survey, {branch.layer for branch in survey.branches}, reasons)]


_ALONE = (
    "{!r} ends a branch of the only residual addition, and no layer comes before or after it: where its branches "
    "are dropped, the output depends on the skip alone.\n"
    "  if the sum joins two towers, or is an error, choose the layers yourself: inject(model, DropPath(), layers=...)"
)


def _check_no_stochastic_depth(model: nn.Module, survey: Survey) -> None:
    rates = {rate: rate.value_in(model) for rate in survey.drop_rates.per_sample}
    active = [rate for rate in survey.drop_rates.rates if rates.get(rate)]
    if active:
        first, names = active[0], sorted({rate.layer.rpartition(".")[2] for rate in active})
        patterns = ", ".join(f"'**.{name}': 2" for name in names)
        raise InjectionError(
            f"stochastic_depth: the model already has it: {first.layer!r} is a "
            f"{type(model.get_submodule(first.layer)).__name__} at rate {rates[first]:g}.\n"
            "  build the model without it (timm: drop_path_rate=0.0, torchvision: stochastic_depth_prob=0.0), or "
            f"multiply its rates, by 2 for example: inject(model, set_dropout(), p_scale={{{patterns}}})"
        )


@dataclass(frozen=True)
class layer_drop(Recipe):
    """LayerDrop: in each forward, every layer returns its input with probability `p`, which saves its time.

    Fan et al. 2020, arXiv:1909.11556. Unlike DropPath, it drops whole layers and does not rescale. The
    layers are those that return their input plus residual branches, also with norms on the way, in the shape of the
    input: transformer layers, and blocks of CNNs without an activation after the addition.

    Every layer has the rate `p`, as in the paper. The rates of LayerSkip (Elhoushi et al. 2024, arXiv:2404.16710):
    `inject(..., p_scale=lambda name, i, n: 2 ** (i / (n - 1)) - 1)`.

    Args:
        p: probability of skipping a layer, in [0, 1).
        mode: `"batch"` draws once for each layer and forward, `"row"` once for each sample: see `LayerDrop`.

    Raises:
        LayerError: the model has no such layer.
        InjectionError: in forward, a layer fills a KV cache.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> size = dict(num_hidden_layers=2, hidden_size=16, intermediate_size=16)
        >>> heads = dict(num_attention_heads=2, num_key_value_heads=2)
        >>> model = LlamaForCausalLM(LlamaConfig(**size, **heads, vocab_size=9))
        >>> [site.name for site in inject(model, layer_drop(p=0.2)).sites]
        ['model.layers.0', 'model.layers.1']
    """

    p: float = 0.1
    mode: str = "batch"

    def __post_init__(self) -> None:
        LayerDrop(self.p, self.mode)

    def sites(self, model: nn.Module, survey: Survey) -> Sequence[RecipeSite]:
        _require_branches(self, model, survey)
        names = [name for name, reason in survey.skippable.items() if not reason]
        if not names:
            name, reason = next(iter(survey.skippable.items()))
            raise LayerError(
                f"layer_drop found no layer of {type(model).__name__} that could be skipped: {name!r} could not, "
                f"because {reason}.\n  drop residual branches instead: stochastic_depth(p=...)"
            )
        return [RecipeSite(name, LayerDrop(self.p, self.mode)) for name in names]

    def warnings(self, model: nn.Module, survey: Survey, sites: Sequence[RecipeSite]) -> Sequence[str]:
        reasons = [(reason, name or "the model") for name, reason in survey.skippable.items()]
        return _skipped_warnings(survey, {*survey.skippable}, reasons)


@dataclass(frozen=True)
class residual_dropout(Recipe):
    """Dropout in a transformer that ships without it, on what each branch adds to the residual stream.

    The sites are the ends of the residual branches: the outputs of attention and of the MLP in every layer; where a
    norm ends the branch (Gemma 2, OLMo 2), the output of the norm. The embeddings are not regularized. Vaswani et al.
    2017, arXiv:1706.03762, section 5.4.

    Every layer has the rate `p`. `inject(..., p_scale="depth_from_zero")` has 0 in the first layer to `p` in the last,
    as in LIMA (Zhou et al. 2023, arXiv:2305.11206, section 3). All branches of a layer have the same rate.

    Args:
        p: probability to zero an element.

    Raises:
        LayerError: the model has no layer that adds branches to tokens: (N, L, C), or any shape beside attention.
        InjectionError: the layers already have dropout.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> size = dict(num_hidden_layers=2, hidden_size=16, intermediate_size=16)
        >>> heads = dict(num_attention_heads=2, num_key_value_heads=2)
        >>> model = LlamaForCausalLM(LlamaConfig(**size, **heads, vocab_size=9))
        >>> drop = inject(model, residual_dropout(p=0.1))
        >>> [site.name for site in drop.sites][:2]
        ['model.layers.0.self_attn', 'model.layers.0.mlp']
    """

    p: float = 0.1

    def __post_init__(self) -> None:
        Dropout(self.p)

    def sites(self, model: nn.Module, survey: Survey) -> Sequence[RecipeSite]:
        branches = _of_tokens(survey, _require_branches(self, model, survey))
        layers = {one.layer for one in branches if survey.calls(one.layer).resembles_input}
        found = [one for one in survey.branches if one.layer in layers]  # also the packed tokens (N L, C) of experts
        if not found:  # the layers of some models are lists of branches
            lists = tuple(f"{name}." for names in survey.trace.lists.values() for name in names)
            found = [one for one in branches if one.layer == one.end and f"{one.end}.".startswith(lists)]
        if not found:
            raise LayerError(
                f"residual_dropout found no transformer layer in {type(model).__name__}: it looks for layers that add "
                "residual branches to tokens (N, L, C).\n"
                "  choose the layers yourself: inject(model, Dropout(p=0.1), layers=...)"
            )
        _check_no_dropout(model, survey, tuple(f"{branch.layer}." for branch in found))
        return [RecipeSite(one.end, Dropout(self.p), group=one.layer) for one in found]

    def warnings(self, model: nn.Module, survey: Survey, sites: Sequence[RecipeSite]) -> Sequence[str]:
        groups, tokens = {site.group for site in sites}, {one.layer for one in _of_tokens(survey, survey.branches)}
        others = dict.fromkeys(one.layer for one in survey.branches if one.layer not in groups)
        reasons = {True: "the output is not the input plus branches", False: "no branch is added to tokens there"}
        return _skipped_warnings(survey, groups, [(reasons[name in tokens], name) for name in others])


def _of_tokens(survey: Survey, branches: Iterable[Branch]) -> list[Branch]:
    """Return the branches with tokens (N, L, C), or (L, C) or (N, H, W, C) in layers with attention, and not maps.

    Linear layers act on the last axis of tokens.
    """
    attends = {call.name for core in attention_cores(survey.trace) if core.call for call in core.call.around()}
    weighted = [op for op in survey.trace.ops if has_weights(op)]
    reads = [(op, {node.size: node.shape[-1] for node in op.inputs if node.is_data and node.fits}) for op in weighted]
    found = []
    for one in branches:
        is_usual, size, call = len(one.shape) == 3, math.prod(one.shape), survey.layers[one.layer][0]
        own = [(op, read) for op, read in reads if size in read and call.start < op.index < call.end]
        features = {read.get(size) for op, read in (reads if is_usual else own) if op.name in PRODUCTS}
        is_map = own and _OF_MAPS.issuperset(op.name for op, _ in own)
        if (is_usual or one.layer in attends) and not is_map and features & {*one.shape[1 if is_usual else -1 :]}:
            found.append(one)
    return found


_OF_MAPS = CONVS | {"batch_norm", "group_norm", "instance_norm"}


def _check_no_dropout(model: nn.Module, survey: Survey, layers: tuple[str, ...]) -> None:
    for rate in (*survey.drop_rates.rates, *survey.drop_rates.constants):
        value = rate.value_in(model)
        name = f"{rate.layer}.{rate.attribute}"
        if value and name.startswith(layers) and rate not in survey.drop_rates.aside:
            fix = "it is a number in the code" if rate.constant else "change it: inject(model, set_dropout(p=p))"
            raise InjectionError(
                f"residual_dropout: the model already has dropout: {name} is {value:g}.\n"
                f"  {fix}   list all: print(hookdrop.plan(model, set_dropout()))"
            )


def _require_branches(recipe: Recipe, model: nn.Module, survey: Survey) -> Sequence[Branch]:
    """Return the residual branches, or raise if there are none."""
    if survey.branches:
        return survey.branches
    what = "it looks for additions of a tensor and of what layers compute from it, in a forward of the example.\n"
    if survey.gaps[0]:
        blocks, reasons = zip(*survey.gaps[0].items(), strict=True)
        what = f"no hook can reach the end of those in {some([one or 'the model' for one in blocks])}: {reasons[0]}\n"
    raise LayerError(
        f"{type(recipe).__name__} found no residual branch in {type(model).__name__}: {what}"
        f"{unregistered(named_layers(model))}"
        "  choose the layers yourself: inject(model, ..., layers=...)\n"
        "  see all:                    print(hookdrop.layers(model))"
    )


def _skipped_warnings(survey: Survey, known: set[str], refused: Iterable[tuple[str, str]]) -> Sequence[str]:
    """Return the warnings about layers without sites: those refused for a reason, and others like the known ones."""
    others = [name for name in _like(survey, known) if name not in known]
    found = [
        *((f"{reason}.", name) for reason, name in refused if reason),
        *((_why_unseen(survey, name), name) for name in others if name not in survey.layers),
        *((why, name or "the model") for name, why in survey.gaps[0].items()),
        *(("their attention is in no residual branch.", name) for name in _apart(survey, known)),
    ]
    reasons: dict[str, dict[str, None]] = {}
    for reason, name in found:
        reasons.setdefault(reason, {})[name] = None
    return [f"skipped {counted(len(names), 'layer')}, {some(list(names))}: {why}" for why, names in reasons.items()]


def _why_unseen(survey: Survey, name: str) -> str:
    if isinstance(survey.model.get_submodule(name), torch.jit.ScriptModule):
        return "torch.jit compiled them, so they run no hooks."
    return "the example does not call them."


def _apart(survey: Survey, known: set[str]) -> list[str]:
    """Return the layers with attention outside of residual branches: known ones, and the outermost numbered ones."""
    found: list[str] = []
    for call in survey.gaps[1]:
        names = [one.name for one in call.around()]
        numbered = [name for name in names if name.rpartition(".")[2].isdigit()]
        outside = [name for name in numbered if not any(one.startswith(f"{name}.") for one in known)]
        found += [name for name in names if name in known][-1:] or outside[-1:]
    return found


def _like(survey: Survey, names: Collection[str]) -> list[str]:
    """Return these layers, and those like them: with the end of a branch, and a name that differs in indices only."""
    layers = survey.trace.modules
    ends: dict[str, set[str]] = {_pattern(name): set() for name in names}
    for name in names:
        inside = [branch.end for branch in survey.branches if branch.end.startswith(f"{name}.")]
        ends[_pattern(name)].update(end.removeprefix(f"{name}.") for end in inside)
    return [
        name
        for name in layers
        if name in names or any(f"{name}.{end}" in layers for end in ends.get(_pattern(name), ()))
    ]


def _pattern(name: str) -> str:
    """Return a name without its numbers, as in `s2.b1` of a RegNet; the name itself if it does not end with one."""
    return re.sub(r"\d+", "#", name) if name[-1:].isdigit() else name

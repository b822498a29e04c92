"""Stochastic depth: drop whole residual branches, at a rate that grows with depth."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import nn

from hookdrop.recipes.base import Recipe, RecipeSite
from hookdrop.regularizers import DropPath
from hookdrop.utils.errors import InjectionError, LayerError
from hookdrop.utils.select import named_layers
from hookdrop.utils.tables import counted, some

if TYPE_CHECKING:
    from hookdrop.survey import Branch, Survey


@dataclass(frozen=True)
class stochastic_depth(Recipe):
    """DropPath at the end of each residual branch, so that a sample skips the whole branch.

    The rate grows from 0 at the first block to `p` at the last: `inject(..., p_scale="depth")` starts above 0 as in the
    paper, `"equal"` uses `p` in every block, and `lambda name, i, n: i / n` is that of both libraries' EfficientNets.
    Huang et al. 2016, arXiv:1603.09382, section 3. Running the model shows the branches: all additions of a tensor and
    of what layers compute from it.

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
        branches = require_branches(self, model, survey)
        _check_no_stochastic_depth(model, branches)
        chosen = [branch for branch in branches if not self._refusal(survey, branch)]
        if not chosen:
            raise LayerError(
                f"stochastic_depth cannot drop any residual branch of {type(model).__name__}. The first ends at "
                f"{branches[0].end!r}: {self._refusal(survey, branches[0])}."
            )
        return [RecipeSite(self._site(model, one), DropPath(self.p, self.mode), group=one.layer) for one in chosen]

    def _refusal(self, survey: Survey, branch: Branch) -> str:
        """Return why a branch cannot be dropped; empty if it can."""
        if branch.layer in survey.layers:
            inputs = survey.layers[branch.layer].inputs
            if inputs and len(inputs[0].shape) > len(branch.shape) and inputs[0].size > math.prod(branch.shape):
                return "the layer has several residual streams"
        found = "" if self.mode == "batch" else survey.samples(branch.end)
        return (
            f'the samples are unknown there (mode="batch" includes it): {found}'
            if found and isinstance(found, str)
            else ""
        )

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
        every = set(_like(model, survey, super().groups(model, survey, sites)))
        return [name for name in survey.layers if name in every]

    def warnings(self, model: nn.Module, survey: Survey, sites: Sequence[RecipeSite]) -> Sequence[str]:
        groups = {site.group for site in sites}
        reasons: dict[str, list[str]] = {}
        for branch in survey.branches:
            if branch.layer not in groups and (reason := self._refusal(survey, branch)):
                reasons.setdefault(reason, []).append(branch.layer)
        skipped = {f"{reason}.": list(dict.fromkeys(names)) for reason, names in reasons.items()}
        return skipped_warnings(model, survey, {branch.layer for branch in survey.branches}, skipped)


def require_branches(recipe: Recipe, model: nn.Module, survey: Survey) -> Sequence[Branch]:
    """Return the residual branches, or raise if there are none."""
    if not survey.branches:
        raise LayerError(
            f"{type(recipe).__name__} found no residual branch in {type(model).__name__}: it looks for additions of a "
            "tensor and of what layers compute from it, in a forward of the example.\n"
            "  choose the layers yourself: inject(model, ..., layers=...)\n"
            '  see all:                    print(hookdrop.plan(model, layers="**"))'
        )
    return survey.branches


def skipped_warnings(model: nn.Module, survey: Survey, known: set[str], skipped: dict[str, list[str]]) -> Sequence[str]:
    """Return the warnings about layers without sites: `skipped` by reason, and those like a `known` layer."""
    others = [name for name in _like(model, survey, list(known)) if name not in known]
    reasons = {
        "the example does not call them.": [name for name in others if name not in survey.layers],
        "a residual branch there does not end with a module.": survey.gaps[0],
        "their attention is in no residual branch.": _apart(survey, known),
    }
    skipped = skipped | {reason: list(names) for reason, names in reasons.items() if names}
    return [f"skipped {counted(len(names), 'layer')}, {some(names)}: {reason}" for reason, names in skipped.items()]


def _apart(survey: Survey, known: set[str]) -> list[str]:
    """Return the layers with attention outside of residual branches: known ones, and the outermost numbered ones."""
    found: list[str] = []
    for call in survey.gaps[1]:
        names = [one.name for one in call.around() if one.name in known]
        numbered = [one.name for one in call.around() if one.name.rpartition(".")[2].isdigit()]
        found += names[-1:] or [name for name in numbered if not any(k.startswith(f"{name}.") for k in known)][-1:]
    return list(dict.fromkeys(found))


def _like(model: nn.Module, survey: Survey, names: Sequence[str]) -> list[str]:
    """Return these layers, and those like them: with the end of a branch, and a name that differs in indices only."""
    layers = {layer.name: layer.module for layer in named_layers(model)}
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
    """Return a name without its indices; the name itself if the last segment is none."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "#", f".{name}") if name.rpartition(".")[2].isdigit() else name


def _check_no_stochastic_depth(model: nn.Module, branches: Sequence[Branch]) -> None:
    for name in dict.fromkeys(part for branch in branches for part in branch.parts):
        module = model.get_submodule(name)
        rate = next((getattr(module, rate) for rate in ("drop_prob", "p") if hasattr(module, rate)), 0.0)
        if rate and not isinstance(module, nn.Dropout):
            raise InjectionError(
                f"stochastic_depth: the model already has it: {name!r} is a {type(module).__name__} at rate {rate:g}.\n"
                "  build the model without it (timm: drop_path_rate=0.0, torchvision: stochastic_depth_prob=0.0), or "
                f"change its rate: inject(model, set_dropout(p={{'**.{name.rpartition('.')[2]}': p}}))"
            )
    for layer in named_layers(model):
        rate = vars(layer.module).get("drop_path")
        if isinstance(rate, float) and rate:
            raise InjectionError(
                f"stochastic_depth: the model already has it: {layer.name}.drop_path is {rate:g}.\n"
                "  build the model without it, or set the attribute to 0."
            )

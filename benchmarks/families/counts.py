"""Compare the sites of a recipe with the layers and heads that the config of a model counts, and with its own lists.

The config and the lists know nothing of the recipes. A layer is a module in an innermost list of layers whose length is
a number of layers in the config.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

import hookdrop
from families.layers import Layers, Run, attentions, is_layer, stacks
from models import equal

_LAYERS = r"(.*_)?(n_)?(layers?|depths?|blocks?)(_per_stage)?"
_HEADS = r"(.*_)?(n_)?heads?(_per_stage)?"
_WITHOUT_HEADS = re.compile("mixer|mamba|ssm|recurrent|rwkv|delta|retention|fourier|linear|lightning", re.IGNORECASE)
_IN_EACH_LAYER = ("layer_drop", "stochastic_depth", "residual_dropout", "head_dropout", "drop_key")


def differences(recipe: str, model: nn.Module, planned: Sequence[tuple[Run, hookdrop.Plan]]) -> list[str]:
    """Return how the sites differ from the layers and heads of the config, unless a warning names the difference."""
    found = [text for _, plan in planned for text in equal.differences(plan)]
    if not hasattr(model, "config"):
        return found
    full = [(f"{run.name}." if run.name else "", plan) for run, plan in planned]
    sites = [f"{prefix}{site.name}" for prefix, plan in full for site in plan.sites]
    names = [f"{prefix}{one}" for prefix, plan in full for one in equal.named(plan.warnings)]
    drops = [site.regularizer for _, plan in planned for site in plan.sites]
    counted = _numbers(model.config, _HEADS)
    if strange := {drop.heads for drop in drops if isinstance(drop, hookdrop.HeadDropout)} - counted:
        found.append(f"the sites have {sorted(map(str, strange))} heads, the config has {sorted(counted)}")
    counts, called = _numbers(model.config, _LAYERS), called_in(planned)
    for stack, layers in _innermost(model, stacks(model)) if recipe in _IN_EACH_LAYER else ():
        # A list that no planned forward calls is in a part that the recipe refused.
        if len(layers) in counts and called & {name for name, _ in layers}:
            found += _misplaced(recipe, stack, layers, sites, names)
    return found


def called_in(planned: Sequence[tuple[Run, hookdrop.Plan]]) -> set[str]:
    """Return the names of the layers that the forward of a plan calls."""
    return {f"{run.name}.{name}".lstrip(".") for run, plan in planned if plan.survey for name in plan.survey.layers}


def _misplaced(recipe: str, stack: str, layers: Layers, sites: Collection[str], names: Sequence[str]) -> Iterator[str]:
    """Yield a text if a site contains this list of layers, and one if layers have no site."""
    of_heads = recipe in ("head_dropout", "drop_key")
    around = [site for site in sites if equal.is_in(stack, site) and not of_heads]
    if around and not all(equal.is_named(name, names) for name, _ in layers):
        yield f"the site {around[0]!r} contains all {len(layers)} layers of {stack}"
    expected = [name for name, layer in layers if not of_heads or _has_heads(layer)]
    if recipe == "layer_drop":
        got = [name for name in expected if name in sites]
    else:
        got = [name for name in expected if any(equal.is_in(site, name) for site in sites)]
    missing = [name for name in expected if name not in got and not equal.is_named(name, names)]
    if missing:
        yield f"sites in {len(got)} of the {len(expected)} layers of {stack}, none in {missing[0]}"


def _has_heads(layer: nn.Module) -> bool:
    """Whether a layer has attention with a softmax, by the names of classes."""
    return any(not _WITHOUT_HEADS.search(name) for name in attentions(layer))


def _innermost(model: nn.Module, lists: Iterable[tuple[str, Layers]]) -> Iterator[tuple[str, Layers]]:
    """Yield the innermost lists of layers. The blocks of a stage are layers, the parts of a layer of T5 are not all."""
    for stack, layers in lists:
        inner: list[tuple[str, Layers]] = []
        for name, layer in layers:
            own = [(f"{name}.{key}", child) for key, child in layer.named_children() if is_layer(child)]
            inner += [(name, own)] if isinstance(layer, nn.ModuleList) else stacks(layer, f"{name}.")
        whole = [(name, own) for name, own in inner if own and len(own) == len([*model.get_submodule(name).children()])]
        yield from _innermost(model, whole) if whole else [(stack, layers)]


def _numbers(config: PreTrainedConfig, pattern: str) -> set[int]:
    """Return the integers in a config, its sub-configs and its lists under names that match a pattern."""
    found: set[int] = set()

    def visit(name: str, value: Any) -> None:
        if isinstance(value, PreTrainedConfig):
            for key, one in vars(value).items():
                visit(key, one)
        elif isinstance(value, list | tuple):
            for one in value:
                visit(name, one)
        elif isinstance(value, int) and not isinstance(value, bool) and re.fullmatch(pattern, name):
            found.add(value)

    visit("", config)
    return found

"""What a plan can know before anything is placed."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from torch import nn

from hookdrop.core import events
from hookdrop.core.parts import REGULARIZERS
from hookdrop.core.regularizer import drops_elements
from hookdrop.core.tables import counted
from hookdrop.guards.messages import find

WITHOUT_FORWARD = ("erased", "high_rate", "nested", "fused_encoder")
WITH_FORWARD = ("on_output", "whole_block", "never_called", "frozen", "before_batch_norm")

# From this rate on, dropout's variance shift in a following batch norm outweighs its benefit (arXiv:1801.05134).
_HIGH_RATE = 0.3
_KEEP_RATES = 0.8, 0.95  # probably the fraction to keep


def plan_warnings(plan: Any, seen: Sequence[Any] = ()) -> dict[str, str]:
    """Return the warnings about the sites of a plan: without a forward, or with what one has `seen` (`LayerCalls`)."""
    of_layers = () if plan.recipe else ("already_drops",)  # a recipe knows the dropout of the model
    # The rates of dropout that the model already has can only be too high ("erased", the first kind).
    without = WITHOUT_FORWARD[:1] if plan.sites[0].attribute else WITHOUT_FORWARD
    kinds = (*WITH_FORWARD, *of_layers) if seen else without
    return find(kinds, Planned(plan, seen))


class Planned:
    def __init__(self, plan: Any, seen: Sequence[Any]) -> None:
        self.model, self.sites = plan.root, plan.sites
        self._seen = list(zip(self.sites, seen, strict=True)) if seen else []

    @property
    def erased(self) -> list[str]:
        """A drop probability reaches 1, except that of DropPath, whose branch has a skip."""
        certain = [site for site in self.sites if not isinstance(site.regularizer, REGULARIZERS["DropPath"])]
        return [site.name for site in certain if site.highest >= 1.0]

    @property
    def on_output(self) -> dict[str, Any]:
        """The regularizer drops a prediction that the model returns: see `find_predictions`."""
        return _first([(s, {"layer": seen.predicts}) for s, seen in self._seen if seen.predicts and s.highest > 0.0])

    @property
    def high_rate(self) -> dict[str, Any]:
        """DropBlock or DropPath at a rate from 0.8 to 0.95."""
        kinds, (low, high) = (REGULARIZERS["DropBlock"], REGULARIZERS["DropPath"]), _KEEP_RATES
        return _first(
            [(s, {"p": s.p}) for s in self.sites if isinstance(s.regularizer, kinds) and low <= (s.p or 0.0) <= high]
        )

    @property
    def nested(self) -> dict[str, Any]:
        """The name of a site starts with that of another; the longest chain gives the effective rate."""
        # The submodules of a block are not part of its skip, and the scores of attention belong to one module each.
        if len(self.sites) == 1:
            return {}
        by_name = {site.name: site for site in self.sites if site.at not in ("skip", "scores")}
        chains = []
        for name, site in by_name.items():
            parents = ["", *(name[:i] for i, character in enumerate(name) if character == ".")] if name else []
            if around := [by_name[parent] for parent in parents if parent in by_name]:
                chains.append([*around, site])
        if not chains:
            return {}
        longest = max(chains, key=len)
        kept = prod(1.0 - min(site.highest, 1.0) for site in longest)
        rate = f" (effective rate {1 - kept:.2g})" if kept < 1 else ""
        path = " > ".join(repr(site.name) for site in longest)
        return {"n": len(chains), "of": len(self.sites), "levels": len(longest), "rate": rate, "path": path}

    @property
    def fused_encoder(self) -> bool:
        """A hooked module is part of a `TransformerEncoderLayer`."""
        encoders = [module for module in self.model.modules() if isinstance(module, nn.TransformerEncoderLayer)]
        fused = {id(part) for encoder in encoders for part in encoder.modules()}
        return not fused.isdisjoint([id(site.module) for site in self.sites])

    @property
    def whole_block(self) -> dict[str, Any]:
        """The output of the forward is close to the sum of the input and something else."""
        kinds = REGULARIZERS["DropPath"], REGULARIZERS["ShakeDrop"]
        whole = [s for s, seen in self._seen if seen.resembles_input and isinstance(s.regularizer, kinds)]
        return _first([(s, {"does": "drops" if drops_elements(s.regularizer) else "perturbs"}) for s in whole])

    @property
    def never_called(self) -> list[str]:
        """The forward of the example did not call the layer."""
        return [site.name for site in self.sites if site.calls == 0]

    @property
    def frozen(self) -> list[str]:
        """The layer has parameters, and none of them requires gradients."""
        weights = [(site, list(site.module.parameters())) for site in self.sites]
        return [site.name for site, own in weights if own and not any(weight.requires_grad for weight in own)]

    @property
    def before_batch_norm(self) -> list[str]:
        """The output of the site is the input of a batch norm, and its rate is at least 0.3."""
        kinds = REGULARIZERS["Dropout"], REGULARIZERS["DropBlock"], REGULARIZERS["GaussianDropout"]
        high = [site for site, _ in self._seen if isinstance(site.regularizer, kinds) and (site.p or 0.0) >= _HIGH_RATE]
        return [site.name for site, seen in self._seen if seen.feeds_norm and site in high]

    @property
    def already_drops(self) -> dict[str, Any]:
        """The layer, or one that gets its output, returns its input in eval mode and stores a number in (0, 1)."""
        found: dict[str, tuple[Any, dict[str, Any]]] = {}
        for site, seen in self._seen:
            for name in seen.identities if site.at == "output" else ():
                stored = vars(self.model.get_submodule(name)).items()
                if rates := [(key, x) for key, x in stored if isinstance(x, float) and 0.0 < x < 1.0]:
                    found[site.name] = site, {"other": name, "key": rates[0][0], "rate": rates[0][1]}
        return _first([*found.values()])


def _first(found: list[tuple[Any, dict[str, Any]]]) -> dict[str, Any]:
    """Return the first site for a message, with what was found there, and the number of those like it."""
    more = f" (and {counted(len(found) - 1, 'more site')} like it)" if len(found) > 1 else ""
    return (
        {"title": found[0][0].regularizer.title, "site": found[0][0].name, "more": more} | found[0][1] if found else {}
    )


def _warn(plan: Any) -> None:
    parameters = {site.name: site.module for site in plan.sites if site.at == "parameters"}
    if parameters:
        from hookdrop.methods.parameter_hooks import tied_elsewhere  # only parameters need it

        plan.warnings += tied_elsewhere(plan.root, parameters, plan.spec.tensor)
    plan.add(plan_warnings(plan))


events.planned.append(_warn)

"""The checks of one recipe in one model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import hookdrop
from families.inputs import BATCH
from families.layers import Run
from hookdrop.recipes import RECIPES
from hookdrop.utils.tensor_tree import map_tensor, tensors as all_tensors
from models.check import CheckFailed, require, short_traceback
from models.footprint import bit_equal, differences, fingerprint, footprint

class Unsupported(Exception):
    """The recipe raised an error: it does not support the model."""


class RecipeCheck:
    def __init__(self, model: nn.Module, runs: Sequence[Run], recipe: str, settings: dict[str, Any]) -> None:
        self.model, self.runs, self.settings = model, runs, settings
        self.recipe = getattr(hookdrop.recipes, recipe)
        self.before, self.checksums = footprint(model), fingerprint(model)
        self.outputs = self.evaluate()
        self.gradients = self.train()
        self.model.zero_grad(set_to_none=True)
        self.before, self.checksums = footprint(model), fingerprint(model)
        self.outputs = self.evaluate()

    def plan(self) -> hookdrop.Plan:
        try:
            plan = self.recipe.plan(self.model, **self.settings)
        except hookdrop.HookdropError as error:
            raise Unsupported(str(error).splitlines()[0]) from error
        self.require_unchanged("plan")
        return plan

    def run(self) -> dict[str, Any]:
        plan = self.plan()
        record = {"sites": len(plan.sites), "warnings": list(plan.warnings)}
        drop = plan.apply()
        changed = [part for part in differences(self.before, footprint(self.model)) if part != "hooks"]
        require(not changed, f"inject changed {', '.join(changed)}")
        require(bit_equal(self.evaluate(), self.outputs), "eval output differs with hooks")
        silent = [site.name for site in drop.sites if not site.fired]
        require(not silent, f"{len(silent)} sites did not fire, such as {silent[:1]}")
        gradients = self.train()
        changed = sorted(gradients ^ self.gradients)[:3]
        require(not changed, f"different parameters have gradients: {changed}")
        self.model.zero_grad(set_to_none=True)
        drop.remove()
        self.require_unchanged("remove")
        require(fingerprint(self.model) == self.checksums, "a parameter or buffer changed")
        require(bit_equal(self.evaluate(), self.outputs), "eval output differs after remove")
        require(not hookdrop.find(self.model), "an injection is left after remove")
        return record

    def require_unchanged(self, verb):
        changed = differences(self.before, footprint(self.model))
        require(not changed, f"{verb} changed {', '.join(changed)}")

    @torch.no_grad()
    def evaluate(self) -> list[Tensor]:
        self.model.eval()
        torch.manual_seed(0)
        return [x for run in self.runs for x in float_tensors(run())]

    def train(self) -> set[str]:
        self.model.train()
        torch.manual_seed(0)
        losses = [x.float().mean() for run in self.runs for x in float_tensors(run()) if x.requires_grad]
        require(bool(losses), "no output has a gradient")
        loss = torch.stack(losses).sum()
        loss.backward()
        grads = {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}
        require(bool(loss.isfinite()), "the loss is not finite")
        require(all(bool(g.isfinite().all()) for g in grads.values()), "a gradient is not finite")
        return set(grads)


def float_tensors(value: Any) -> list[Tensor]:
    return [x for x in all_tensors(value) if x.is_floating_point()]

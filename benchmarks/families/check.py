"""The checks that every recipe has to pass in a model: only hooks are added, and `remove` restores every bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import hookdrop
from families.layers import Run
from hookdrop.recipes.base import Recipe
from hookdrop.survey.facts import survey
from hookdrop.utils.tensor_tree import tensors
from models.check import NotRunnable, require
from models.footprint import bit_equal, differences, fingerprint, footprint


@dataclass
class Injected:
    """What a recipe found in the runs of a model. All names are those of the model, not of its parts."""

    sites: dict[str, Any] = field(default_factory=dict)
    """The regularizer of each site."""
    blocks: dict[str, list[str]] = field(default_factory=dict)
    """The ends of the residual branches of each layer, if they are sites."""
    inner: set[str] = field(default_factory=set)
    """The layers that are not their input plus branches, such as blocks with projections."""
    warnings: list[tuple[str, str]] = field(default_factory=list)
    """The warnings of the plans, after the prefix of the names in them."""


class RecipeCheck:
    """A model with its behavior without hooks."""

    def __init__(self, model: nn.Module, runs: Sequence[Run]) -> None:
        """Train for one step and evaluate without hooks.

        Raises:
            NotRunnable: the model does not train.
        """
        self.model, self.runs = model, runs
        try:
            self.gradients = self._train()
            self.outputs = self._evaluate()
            require(not any(bool(x.isnan().any()) for x in self.outputs), "the output contains NaN")
        except TimeoutError:
            raise
        except Exception as error:
            raise NotRunnable(f"without hooks: {type(error).__name__}: {str(error).splitlines()[:1]}") from error
        self.before, self.checksums = footprint(model), fingerprint(model)
        self._train()
        self._evaluate()
        # I-BERT replaces its buffers in each forward.
        self.before = {key: value for key, value in footprint(model).items() if value == self.before[key]}

    def run(self, recipe: Recipe) -> Injected:
        """Inject in each run, evaluate, run one training step, and remove; return the sites.

        Raises:
            LayerError, InjectionError: the recipe refuses the model.
            CheckFailed: a guarantee is broken.
        """
        found = self._plan(recipe)
        self._require_unchanged("plan")
        self._check(
            [hookdrop.inject(run.module, recipe, p_scale="equal", example_input=run.inputs) for run in self.runs]
        )
        return found

    def run_value(self, recipe: Any, example: Any) -> hookdrop.Plan:
        """The same in one run; return the plan."""
        plan = hookdrop.plan(self.model, recipe, example_input=example)
        self._require_unchanged("plan")
        self._check([hookdrop.inject(self.model, recipe, example_input=example)])
        return plan

    def _plan(self, recipe: Recipe) -> Injected:
        found = Injected()
        for run in self.runs:
            plan = hookdrop.plan(run.module, recipe, p_scale="equal", example_input=run.inputs)
            prefix = f"{run.name}." if run.name else ""
            found.sites |= {f"{prefix}{site.name}": site.regularizer for site in plan.sites}
            found.warnings += [(prefix, warning) for warning in plan.warnings]
            facts = survey(run.module, run.inputs)
            found.inner |= {f"{prefix}{name}" for name, reason in facts.skippable.items() if reason}
            for branch in facts.branches:
                if f"{prefix}{branch.end}" in found.sites:
                    found.blocks.setdefault(f"{prefix}{branch.layer}", []).append(f"{prefix}{branch.end}")
        return found

    def _check(self, drops: Sequence[hookdrop.Injection]) -> None:
        changed = [part for part in differences(self.before, footprint(self.model)) if part != "hooks"]
        require(not changed, f"inject changed {', '.join(changed)}")
        require(bit_equal(self._evaluate(), self.outputs), "eval output differs with hooks")
        silent = [site.name for drop in drops for site in drop.sites if not site.called]
        require(not silent, f"{len(silent)} sites did not fire, such as {silent[:1]}")
        changed = sorted(self._train() ^ self.gradients)[:3]
        require(not changed, f"different parameters have gradients: {changed}")
        for drop in drops:
            drop.remove()
        self._require_unchanged("remove")
        require(fingerprint(self.model) == self.checksums, "a parameter or buffer changed")
        require(bit_equal(self._evaluate(), self.outputs), "eval output differs after remove")
        require(not hookdrop.find(self.model), "hookdrop.find still finds an injection after remove")

    def _require_unchanged(self, verb: str) -> None:
        changed = differences(self.before, footprint(self.model))
        require(not changed, f"{verb} changed {', '.join(changed)}")

    @torch.no_grad()
    def _evaluate(self) -> list[Tensor]:
        self.model.eval()
        torch.manual_seed(0)
        return [x for run in self.runs for x in float_tensors(run())]

    def _train(self) -> set[str]:
        """Run a forward and a backward; return the names of the parameters with a gradient."""
        buffers = {name: b.clone() for name, b in self.model.named_buffers()}
        self.model.train()
        torch.manual_seed(0)
        losses = [x.float().mean() for run in self.runs for x in float_tensors(run()) if x.requires_grad]
        require(bool(losses), "no output has a gradient")
        loss = torch.stack(losses).sum()
        loss.backward()
        gradients = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        finite = all(bool(gradient.isfinite().all()) for gradient in gradients.values())
        require(bool(loss.isfinite()) and finite, "the loss or a gradient is not finite")
        self.model.zero_grad(set_to_none=True)
        self.model.eval()
        for name, buffer in self.model.named_buffers():
            if name in buffers and buffer.shape == buffers[name].shape:
                buffer.copy_(buffers[name])
        return set(gradients)


def float_tensors(value: Any) -> list[Tensor]:
    """Return the floating-point tensors in a value."""
    return [x for x in tensors(value) if x.is_floating_point()]

"""The checks that every recipe has to pass in a model: only hooks are added, and `remove` restores every bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import hookdrop
from families.layers import Run
from hookdrop import InjectionError, LayerError
from hookdrop.recipes import Recipe
from models.check import NotRunnable, require
from models.footprint import bit_equal, differences, fingerprint, footprint

Planned = list[tuple[Run, hookdrop.Plan]]
"""The plans of a recipe, each with the forward that its sites were found in."""


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

    def run(self, recipe: Recipe) -> tuple[Planned, list[str]]:
        """Inject in the module of each run, evaluate, run one training step, and remove.

        Returns:
            The plans, and the reasons of the modules that the recipe refuses.

        Raises:
            CheckFailed: a guarantee is broken.
        """
        planned, refused = Planned(), []
        for run in self.runs:
            settings: dict[str, Any] = {"p_scale": "equal", "example_input": run.inputs}
            try:
                plan = hookdrop.plan(run.module, recipe, **settings)
            except (LayerError, InjectionError) as error:
                refused.append(" ".join(str(error).partition("No hook was placed")[0].split()))
                continue
            self._require_unchanged("plan")
            if not any(site.calls for site in plan.sites):
                refused.append(f"{plan.sites[0].name} does not run with these inputs, as the plan warns")
                continue
            self._check(hookdrop.inject(run.module, recipe, **settings))
            planned.append((run, plan))
        return planned, refused

    def _check(self, drop: hookdrop.Injection) -> None:
        changed = [part for part in differences(self.before, footprint(self.model)) if part != "hooks"]
        require(not changed, f"inject changed {', '.join(changed)}")
        require(bit_equal(self._evaluate(), self.outputs), "eval output differs with hooks")
        silent = [site.name for site in drop.sites if not site.called]
        require(not silent, f"{len(silent)} sites did not fire, such as {silent[:1]}")
        changed = sorted(self._train() ^ self.gradients)[:3]
        require(not changed, f"different parameters have gradients: {changed}")
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


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors in a value."""
    return [x for x in tree_leaves(value) if isinstance(x, Tensor)]


def float_tensors(value: Any) -> list[Tensor]:
    """Return the floating-point tensors in a value."""
    return [x for x in tensors(value) if x.is_floating_point()]


def with_first(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return a value with a function applied to its first floating-point tensor."""
    leaves, spec = tree_flatten(value)
    first = next(i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.is_floating_point())
    leaves[first] = function(leaves[first])
    return tree_unflatten(leaves, spec)

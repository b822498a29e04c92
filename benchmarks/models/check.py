"""The full check of one model: plan, inject, one training step, remove, and bit-exact comparisons."""

from __future__ import annotations

import re
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import hookdrop
from hookdrop.recipes import Recipe
from models.catalog import Example
from models.footprint import bit_equal, differences, fingerprint, footprint, tensors
from models.sites import BLOCK, SiteChooser, choose_regularizers, label

LEARNING_RATE = 1e-3
STANDARD_ERRORS = 5.0


class CheckFailed(Exception):
    """hookdrop broke one of its guarantees."""


class NotRunnable(Exception):
    """The model does not run or does not train on this input, even without hookdrop."""


class Check:
    """The steps of the check, in order; `record` holds the results, even if a step fails."""

    def __init__(
        self,
        model: nn.Module,
        example: Example,
        choose: SiteChooser = choose_regularizers,
        recipe: Recipe | None = None,
    ) -> None:
        self.model, self.example, self.choose, self.recipe = model, example, choose, recipe
        self.record: dict[str, Any] = {}
        self.warning_kinds: Counter[str] = Counter()

    def run(self) -> dict[str, Any]:
        """Run all steps on real values.

        Returns:
            The measurements and `status`: "passed", or "failed" with `step`, `error` and `traceback`.

        Raises:
            NotRunnable: the model does not run without hookdrop.
        """
        self._run_without_hookdrop()
        return self._run_steps(self._plan, self._inject, self._train, self._remove)

    def run_on_meta(self) -> dict[str, Any]:
        """Run the steps that need no values: plan, inject, forward and remove."""
        try:
            self.model.eval()
            with torch.no_grad():
                self.model(*self.example.eval)
        except Exception as error:
            raise NotRunnable(f"on the meta device: {_first_line(error)}") from error
        self.before = footprint(self.model)
        return self._run_steps(self._plan, self._inject_on_meta)

    def _run_steps(self, *steps: Callable[[], None]) -> dict[str, Any]:
        self.record["status"] = "passed"
        for step in steps:
            try:
                with self._counting_warnings():
                    step()
            except Exception as error:
                self.record |= {"status": "failed", "step": step.__name__.strip("_"), "error": _first_line(error)}
                self.record["traceback"] = short_traceback()
                break
        if self.warning_kinds:
            self.record["warnings"] = dict(self.warning_kinds)
        return self.record

    @contextmanager
    def _counting_warnings(self) -> Iterator[None]:
        """Count hookdrop's warnings by kind and ignore all others."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                yield
            finally:
                kinds = [_kind(str(w.message)) for w in caught if issubclass(w.category, hookdrop.HookdropWarning)]
                self.warning_kinds.update(kinds)

    def _run_without_hookdrop(self) -> None:
        """Record the loss, the gradients and the eval output of the original model."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.loss = self._loss_and_gradients()
                self.gradients = _gradients(self.model)
                self.model.zero_grad(set_to_none=True)
                self.output = self._evaluate()
        except Exception as error:
            raise NotRunnable(_first_line(error)) from error
        if not self.gradients or not self.output:
            raise NotRunnable("the model has no gradient or no output")
        self.record["finite"] = all(bool(x.isfinite().all()) for x in self.output)
        self.before, self.checksums = footprint(self.model), fingerprint(self.model)

    def _plan(self) -> None:
        rng_state = torch.get_rng_state()
        self.regularizer = self.recipe or self._choose_layers()
        self.plan = hookdrop.plan(self.model, self.regularizer, example_input=self.example.eval)
        self.chosen = {site.name: site.regularizer for site in self.plan.sites}
        self.record["sites"] = dict(Counter(label(regularizer) for regularizer in self.chosen.values()))
        str(self.plan)
        if self.recipe is None:
            planned = {(site.name, site.shape, site.calls) for site in self.plan.sites}
            require(planned <= self.listed, "the plan of the chosen layers differs from the plan of all layers")
        self._require_unchanged("plan", torch.equal(rng_state, torch.get_rng_state()))

    def _choose_layers(self) -> dict[str, hookdrop.Regularizer]:
        plan = hookdrop.plan(self.model, layers="**", example_input=self.example.eval)
        self.record["modules"] = len(plan.sites)
        self.listed = {(site.name, site.shape, site.calls) for site in plan.sites}
        return self.choose(plan)

    def _require_unchanged(self, verb: str, same_rng: bool) -> None:
        changed = differences(self.before, footprint(self.model))
        require(not changed, f"{verb} changed {', '.join(changed)}")
        require(same_rng, f"{verb} changed the RNG state")

    def _inject(self) -> None:
        rng_state = torch.get_rng_state()
        self.drop = hookdrop.inject(self.model, self.regularizer, example_input=self.example.eval)
        self._require_only_hooks_added(torch.equal(rng_state, torch.get_rng_state()))
        require(fingerprint(self.model) == self.checksums, "plan or inject changed a parameter or buffer")
        require(bit_equal(self._evaluate(), self.output), "eval output differs with hooks")
        silent = [site.name for site in self.drop.sites if not site.called]
        require(not silent, f"{len(silent)} sites did not fire, such as {silent[:1]}")

    def _require_only_hooks_added(self, same_rng: bool) -> None:
        after = footprint(self.model)
        changed = [part for part in differences(self.before, after) if part != "hooks"]
        require(not changed, f"inject changed {', '.join(changed)}")
        require(same_rng, "inject changed the RNG state")
        require(after["hooks"] != self.before["hooks"], "inject placed no hook")

    def _inject_on_meta(self) -> None:
        self.drop = hookdrop.inject(self.model, self.regularizer, example_input=self.example.eval)
        self._require_only_hooks_added(True)
        self._evaluate()
        require(all(site.called for site in self.drop.sites), "a site did not fire")
        self.drop.remove()
        self._require_unchanged("remove", True)

    def _train(self) -> None:
        with self.drop.recording(last=0) as measured:
            self._loss_and_gradients()
        self._check_rates(measured.totals)
        gradients = _gradients(self.model)
        changed = sorted(gradients ^ self.gradients)[:3]
        require(not changed, f"different parameters have gradients: {changed}")
        finite = any(bool(p.grad.isfinite().all()) for p in self.model.parameters() if p.grad is not None)
        require(finite or not self.loss.isfinite(), "no finite gradient")
        torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE, foreach=False).step()
        self.model.zero_grad(set_to_none=True)

    def _check_rates(self, measured: Any) -> None:
        """Compare the measured drop rate of each kind of regularizer with the rates of its sites."""
        self.record["elements"] = sum(site.elements for site in measured.sites.values())
        self.record |= {"asked": round(measured.asked, 6), "dropped": round(measured.dropped, 6)}
        shapes = {site.name: site.shape for site in self.plan.sites}
        rates = {site.name: site.p for site in self.plan.sites}
        kinds: dict[str, list[tuple[Any, int, float]]] = {}
        for name, site in measured.sites.items():
            if site.elements:
                block = isinstance(self.chosen[name], hookdrop.DropBlock)
                area = BLOCK ** (len(shapes[name] or ()) - 2) if block else 1
                kinds.setdefault(label(self.chosen[name]), []).append((site, area, rates[name]))
        require(bool(kinds), "no element was regularized in training")
        for kind, sites in kinds.items():
            total = sum(site.elements for site, _, _ in sites)
            dropped = sum(site.zeroed for site, _, _ in sites) / total
            asked = sum(p * site.elements for site, _, p in sites) / total
            # The elements of a block are dropped together, and the number of a few blocks is not normally distributed.
            error = sum(p * (1 - p) * area * site.elements for site, area, p in sites) ** 0.5 / total
            bound = STANDARD_ERRORS * (error + max(area for _, area, _ in sites) / total)
            self.record["deviation"] = max(self.record.get("deviation", 0.0), round(abs(dropped - asked) / error, 2))
            require(
                abs(dropped - asked) <= bound, f"{kind} dropped {dropped:.5f} of {total} elements, expected {asked:.3g}"
            )

    def _remove(self) -> None:
        hooked = self._evaluate()
        checksums = fingerprint(self.model)
        updated = any(checksums[name] != self.checksums[name] for name, _ in self.model.named_parameters())
        require(updated, "the training step updated no parameter")
        if problems := self.drop.check():
            self.record["problems"] = [_kind(problem) for problem in problems]
        self.drop.remove()
        self._require_unchanged("remove", True)
        require(fingerprint(self.model) == checksums, "remove changed a parameter or buffer")
        require(bit_equal(self._evaluate(), hooked), "eval output differs after remove")
        require(not hookdrop.find(self.model), "hookdrop.find still finds an injection after remove")

    def _loss_and_gradients(self) -> Tensor:
        torch.manual_seed(self.example.seed)
        self.model.train()
        output = tensors(self.model(*self.example.train))
        loss = torch.stack([x.float().mean() for x in output if x.requires_grad]).sum()
        loss.backward()
        return loss.detach()

    @torch.no_grad()
    def _evaluate(self) -> list[Tensor]:
        torch.manual_seed(self.example.seed)
        self.model.eval()
        return tensors(self.model(*self.example.eval))


def require(condition: bool, message: str) -> None:
    """Raise `CheckFailed` with `message` unless the condition is true."""
    if not condition:
        raise CheckFailed(message)


def short_traceback() -> str:
    """Format the traceback of the current error, with shortened paths."""
    return re.sub(r'File ".*?((?:[^/"]+/){0,3}[^/"]+)"', r'File "\1"', traceback.format_exc())


def _gradients(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if p.grad is not None}


def _kind(text: str) -> str:
    """Reduce a message to its kind: its first line without names and numbers."""
    line = re.sub(r"'[^']*'(, '[^']*')*", "'...'", text.strip().splitlines()[0])
    short = re.sub(r"#(x#)+", "#x#", re.sub(r"\d+(\.\d+)?", "#", line))
    return ": ".join(short.split(": ")[:2])[:150]


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]

"""The whole check of one model: plan, inject, one training step, remove, and what must be bit for bit the same."""

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
from models.catalog import Example
from models.sites import BLOCK, Chooser, P, label, regularizers
from models.state import differences, fingerprint, footprint, same, tensors

RATE = 1e-3
STANDARD_ERRORS = 5.0


class Broken(Exception):
    """A promise of hookdrop that was not kept."""


class NotRunnable(Exception):
    """The model itself, without hookdrop, does not run, or does not train, on this input."""


class Check:
    """The steps, in order; `record` is what they found, also when one of them fails."""

    def __init__(self, model: nn.Module, example: Example, choose: Chooser = regularizers) -> None:
        self.model, self.example, self.choose = model, example, choose
        self.record: dict[str, Any] = {}
        self.warned: Counter[str] = Counter()

    def run(self) -> dict[str, Any]:
        """Everything on real values.

        Returns:
            `status`: "passed", or "failed" with `step`, `error` and `traceback`; and what was measured.

        Raises:
            NotRunnable: the model does not run by itself.
        """
        self._clean()
        return self._steps(self._plan, self._inject, self._train, self._remove)

    def run_on_meta(self) -> dict[str, Any]:
        """What can be done without values: plan, inject, forward and remove."""
        try:
            self.model.eval()
            with torch.no_grad():
                self.model(*self.example.eval)
        except Exception as error:
            raise NotRunnable(f"on the meta device, {_first_line(error)}") from error
        self.before = footprint(self.model)
        return self._steps(self._plan, self._inject_on_meta)

    def _steps(self, *steps: Callable[[], None]) -> dict[str, Any]:
        self.record["status"] = "passed"
        for step in steps:
            try:
                with self._noted():
                    step()
            except Exception as error:
                self.record |= {"status": "failed", "step": step.__name__.strip("_"), "error": _first_line(error)}
                self.record["traceback"] = trace()
                break
        if self.warned:
            self.record["warnings"] = dict(self.warned)
        return self.record

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Count hookdrop's warnings by kind; the model's own are not of interest."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                yield
            finally:
                kinds = [_kind(str(w.message)) for w in caught if issubclass(w.category, hookdrop.HookdropWarning)]
                self.warned.update(kinds)

    def _clean(self) -> None:
        """Without hookdrop: one training forward and backward, and the eval output."""
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
            raise NotRunnable("it has no gradient or no output")
        self.record["finite"] = all(bool(x.isfinite().all()) for x in self.output)
        self.before, self.bits = footprint(self.model), fingerprint(self.model)

    def _plan(self) -> None:
        random = torch.get_rng_state()
        args = self.example.eval
        listed = hookdrop.plan(self.model, layers="**", example_input=args)
        self.chosen = self.choose(listed)
        self.record["modules"] = len(listed.sites)
        self.record["sites"] = dict(Counter(label(regularizer) for regularizer in self.chosen.values()))
        self.plan = hookdrop.plan(self.model, self.chosen, example_input=args)
        str(self.plan)
        self._unchanged("plan", torch.equal(random, torch.get_rng_state()))
        planned = [(site.name, site.shape, site.calls) for site in self.plan.sites]
        must(planned == [(s.name, s.shape, s.calls) for s in listed.sites if s.name in self.chosen], "other sites")

    def _unchanged(self, what: str, randomness: bool) -> None:
        changed = differences(self.before, footprint(self.model))
        must(not changed, f"{what} changed {', '.join(changed)}")
        must(randomness, f"{what} changed the random state")

    def _inject(self) -> None:
        random = torch.get_rng_state()
        self.drop = self.plan.apply()  # which is what inject does with the plan that it makes
        self._footprint(torch.equal(random, torch.get_rng_state()))
        must(fingerprint(self.model) == self.bits, "plan or inject changed a parameter or buffer")
        must(same(self._evaluate(), self.output), "eval output differs with hooks")
        silent = [site.name for site in self.drop.sites if not site.fired]
        must(not silent, f"{len(silent)} sites did not fire, such as {silent[:1]}")

    def _footprint(self, randomness: bool) -> None:
        after = footprint(self.model)
        changed = [part for part in differences(self.before, after) if part != "hooks"]
        must(not changed, f"inject changed {', '.join(changed)}")
        must(randomness, "inject changed the random state")
        must(after["hooks"] != self.before["hooks"], "inject placed no hook")

    def _inject_on_meta(self) -> None:
        self.drop = self.plan.apply()
        self._footprint(True)
        self._evaluate()
        must(all(site.fired for site in self.drop.sites), "a site did not fire")
        self.drop.remove()
        self._unchanged("remove", True)

    def _train(self) -> None:
        with self.drop.measuring() as measured:
            self._loss_and_gradients()
        self._judge_rates(measured)
        there = _gradients(self.model)
        must(there == self.gradients, f"gradients of other parameters: {sorted(there ^ self.gradients)[:3]}")
        finite = any(bool(p.grad.isfinite().all()) for p in self.model.parameters() if p.grad is not None)
        must(finite or not self.loss.isfinite(), "no finite gradient")
        torch.optim.SGD(self.model.parameters(), lr=RATE, foreach=False).step()
        self.model.zero_grad(set_to_none=True)

    def _judge_rates(self, measured: Any) -> None:
        """What was dropped, by kind of regularizer, against what was asked for."""
        self.record["elements"] = sum(site.elements for site in measured.sites.values())
        self.record |= {"asked": round(measured.asked, 6), "dropped": round(measured.dropped, 6)}
        shapes = {site.name: site.shape for site in self.plan.sites}
        kinds: dict[str, list[tuple[Any, int]]] = {}
        for name, site in measured.sites.items():
            if site.elements:
                block = isinstance(self.chosen[name], hookdrop.DropBlock)
                area = BLOCK ** (len(shapes[name] or ()) - 2) if block else 1
                kinds.setdefault(label(self.chosen[name]), []).append((site, area))
        must(bool(kinds), "nothing was regularized in training")
        for kind, sites in kinds.items():
            total = sum(site.elements for site, _ in sites)
            dropped = sum(site.zeroed for site, _ in sites) / total
            # The elements of a block fall together; a handful of blocks is not normally distributed.
            error = sum(P * (1 - P) * area * site.elements for site, area in sites) ** 0.5 / total
            bound = STANDARD_ERRORS * (error + max(area for _, area in sites) / total)
            self.record["deviation"] = max(self.record.get("deviation", 0.0), round(abs(dropped - P) / error, 2))
            must(abs(dropped - P) <= bound, f"{kind} dropped {dropped:.5f} of {total} elements, asked for {P}")

    def _remove(self) -> None:
        hooked = self._evaluate()
        bits = fingerprint(self.model)
        moved = any(bits[name] != self.bits[name] for name, _ in self.model.named_parameters())
        must(moved, "the training step moved no weights")
        if problems := self.drop.check():
            self.record["problems"] = [_kind(problem) for problem in problems]
        self.drop.remove()
        self._unchanged("remove", True)
        must(fingerprint(self.model) == bits, "remove changed a parameter or buffer")
        must(same(self._evaluate(), hooked), "eval output differs once the hooks are removed")
        must(not hookdrop.find(self.model), "an injection is left")

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


def must(kept: bool, otherwise: str) -> None:
    """Raise `Broken` unless a promise was kept."""
    if not kept:
        raise Broken(otherwise)


def trace() -> str:
    """The traceback of the error at hand, with the ends of its paths only."""
    return re.sub(r'File ".*?((?:[^/"]+/){0,3}[^/"]+)"', r'File "\1"', traceback.format_exc())


def _gradients(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if p.grad is not None}


def _kind(text: str) -> str:
    """What and why, in the first line of a message, without names and numbers."""
    line = re.sub(r"'[^']*'(, '[^']*')*", "'...'", text.strip().splitlines()[0])
    short = re.sub(r"#(x#)+", "#x#", re.sub(r"\d+(\.\d+)?", "#", line))
    return ": ".join(short.split(": ")[:2])[:150]


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]

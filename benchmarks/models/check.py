"""What injecting and removing must keep, in any model: bit-exact comparisons around one training step."""

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

import hookdrop
from hookdrop.recipes import Recipe
from models import equal
from models.catalog import Example
from models.footprint import bit_equal, differences, fingerprint, footprint, tensors

P, BLOCK = 0.1, 3
LEARNING_RATE, STANDARD_ERRORS = 1e-3, 5.0
# Query and key norms: their 4-D tensors are (samples, heads, tokens, channels).
_HEADS = re.compile(r".*\b([qkv]|query|key|value)_?(norm|ln)|.*\bnorm_?[qkv]\b")
Forward = Callable[[], Any]


class CheckFailed(Exception):
    """hookdrop broke one of its guarantees."""


class NotRunnable(Exception):
    """The model does not run or does not train on this input, even without hookdrop."""


def require(condition: object, message: str) -> None:
    """Raise `CheckFailed` with `message` unless the condition is true."""
    if not condition:
        raise CheckFailed(message)


def require_equal(before: dict[str, Any], model: nn.Module, verb: str, *except_for: str) -> None:
    """Raise `CheckFailed` unless the model has this footprint, except for some parts."""
    changed = [part for part in differences(before, footprint(model)) if part not in except_for]
    require(not changed, f"{verb} changed {', '.join(changed)}")


class Behavior:
    """A model, and what it does without hooks.

    Args:
        model: the model; on the meta device, only what needs no values is checked.
        evaluate: a forward in eval mode.
        train: a forward in training mode; None is `evaluate`.
        seed: of the random numbers of a forward.
        strict: whether all gradients of a training step have to be finite, not only some of them, and whether to run
            it twice, to see what the model itself changes.
    """

    def __init__(
        self, model: nn.Module, evaluate: Forward, train: Forward | None = None, seed: int = 0, strict: bool = False
    ) -> None:
        self.model, self._forwards = model, {True: train or evaluate, False: evaluate}
        self._seed, self._finite_gradients = seed, all if strict else any
        self._has_values = not any(p.is_meta for p in model.parameters())
        self.finite = strict
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                footprints = []
                for _ in range(1 + strict):
                    self._gradients = self._train() if self._has_values else set()
                    self.output = self._evaluate()
                    footprints.append(footprint(model))
        except Exception as error:
            raise NotRunnable(f"without hooks: {first_line(error)}") from error
        if not self.output or (self._has_values and not self._gradients):
            raise NotRunnable("the model has no gradient or no output")
        # I-BERT replaces its buffers in each forward.
        self._before = footprints[-1]
        for part in differences(footprints[0], self._before):
            del self._before[part]
        self.finite = self._has_values and all(bool(x.isfinite().all()) for x in self.output)
        if strict and not self.finite:
            raise NotRunnable("without hooks: the output is not finite")

    def read(self, verb: Callable[..., Any], part: nn.Module, *given: Any, **settings: Any) -> Any:
        """Call `plan` or `layers` for the model or a part of it, and check that this changes nothing."""
        state = torch.get_rng_state()
        str(found := verb(part, *given, **settings))
        self._require_unchanged(verb.__name__, state)
        return found

    def inject(self, part: nn.Module, regularizer: Any, **settings: Any) -> tuple[hookdrop.Plan, Any, list[str]]:
        """Plan, inject, evaluate, run one training step, and remove.

        Return the plan, what the step dropped, and the problems that `check` found.
        """
        checksums, plan = fingerprint(self.model), self.read(hookdrop.plan, part, regularizer, **settings)
        state = torch.get_rng_state()
        drop = hookdrop.inject(part, regularizer, **settings)
        self._require_unchanged("inject", state, "hooks")
        require(footprint(self.model)["hooks"] != self._before["hooks"], "inject placed no hook")
        require(fingerprint(self.model) == checksums, "plan or inject changed a parameter or buffer")
        require(bit_equal(self._evaluate(), self.output), "eval output differs with hooks")
        silent = [site.name for site in drop.sites if not site.called]
        require(not silent, f"{len(silent)} sites did not fire, such as {silent[:1]}")
        totals = None
        if self._has_values:
            with drop.recording(last=0) as measured:
                changed = sorted(self._train(update=True) ^ self._gradients)[:3]
            require(not changed, f"different parameters have gradients: {changed}")
            totals = measured.totals
        updated, self.output, problems = fingerprint(self.model), self._evaluate(), drop.check()
        parameters = [name for name, _ in self.model.named_parameters() if name in updated]
        moved = any(updated[name] != checksums[name] for name in parameters)
        require(moved or not self._has_values, "the training step updated no parameter")
        if "repr" in self._before:
            self._before["repr"] = repr(self.model)  # that of I-BERT has ranges, which training updates
        drop.remove()
        self._require_unchanged("remove")
        require(fingerprint(self.model) == updated, "remove changed a parameter or buffer")
        require(bit_equal(self._evaluate(), self.output), "eval output differs after remove")
        require(not hookdrop.find(self.model), "hookdrop.find still finds an injection after remove")
        return plan, totals, problems

    def _require_unchanged(self, verb: str, rng_state: Tensor | None = None, *except_for: str) -> None:
        require_equal(self._before, self.model, verb, *except_for)
        same = rng_state is None or torch.equal(rng_state, torch.get_rng_state())
        require(same, f"{verb} changed the RNG state")

    def _train(self, update: bool = False) -> set[str]:
        """Run a forward and a backward; return the names of the parameters with a gradient."""
        # Of every second element: the mean of all is constant after a layer norm without weights.
        means = [x.float().flatten()[::2].mean() for x in self._run(training=True) if x.requires_grad]
        torch.stack(means).sum().backward()
        found = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        finite = self._finite_gradients(bool(gradient.isfinite().all()) for gradient in found.values())
        require(finite or not self.finite, "the gradients are not finite")
        if update:
            torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE, foreach=False).step()
        self.model.zero_grad(set_to_none=True)
        self.model.eval()
        return set(found)

    @torch.no_grad()
    def _evaluate(self) -> list[Tensor]:
        return self._run(training=False)

    def _run(self, training: bool) -> list[Tensor]:
        torch.manual_seed(self._seed)
        self.model.train(training)
        return tensors(self._forwards[training]())


def check(model: nn.Module, example: Example, recipe: Recipe | None = None) -> dict[str, Any]:
    """Check one model of timm or torchvision, with the sites of a recipe or with all norms, and return the record."""
    if recipe is not None:  # most models of a sweep are refused, which needs no training
        with suppress(hookdrop.InjectionError):
            hookdrop.plan(model, recipe, example_input=example.eval)
    evaluate, train = (lambda given=given: model(*given) for given in (example.eval, example.train))
    behavior = Behavior(model, evaluate, train, example.seed)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        record = _inject(behavior, example.eval, recipe)
    kinds = Counter(kind(str(one.message)) for one in caught if issubclass(one.category, hookdrop.HookdropWarning))
    return record | ({"warnings": dict(kinds)} if kinds else {})


def _inject(behavior: Behavior, example: Any, recipe: Recipe | None) -> dict[str, Any]:
    record: dict[str, Any] = {"status": "passed"}
    model, chosen = behavior.model, recipe
    if recipe is None:
        every = behavior.read(hookdrop.layers, model, example)
        record["modules"], chosen = len(every), choose_regularizers(model, every)
    plan, totals, problems = behavior.inject(model, chosen, example_input=example)
    if recipe is None:
        listed = {(layer.name, layer.shape, layer.calls) for layer in every}
        planned = {(site.name, site.shape, site.calls) for site in plan.sites}
        require(planned <= listed, "the plan of the chosen layers differs from the plan of all layers")
    elif others := [*equal.differences(plan)]:
        record |= {"status": "differs", "error": others[0]}
    record["sites"] = dict(Counter(label(site.regularizer) for site in plan.sites))
    if totals is not None:
        record |= {"finite": behavior.finite, **rates(plan, totals)}
    return record | ({"problems": [*map(kind, problems)]} if problems else {})


def rates(plan: hookdrop.Plan, totals: Any) -> dict[str, Any]:
    """Compare the measured drop rate of each kind of regularizer with the rates of its sites."""
    rows = []
    for site in plan.sites:
        if (measured := totals.sites.get(site.name)) and measured.elements:
            is_block = isinstance(site.regularizer, hookdrop.DropBlock)
            area = BLOCK ** (len(site.shape or ()) - 2) if is_block else 1
            rows.append((label(site.regularizer), measured.elements, measured.zeroed, site.p, area))
    require(rows, "no element was regularized in training")
    deviation, table = 0.0, pd.DataFrame(rows, columns=["kind", "elements", "zeroed", "p", "area"])
    for name, sites in table.groupby("kind"):
        total = sites.elements.sum()
        dropped, asked = sites.zeroed.sum() / total, (sites.p * sites.elements).sum() / total
        # The elements of a block are dropped together, and the number of a few blocks is not normally distributed.
        error = (sites.p * (1 - sites.p) * sites.area * sites.elements).sum() ** 0.5 / total
        bound = STANDARD_ERRORS * (error + sites.area.max() / total)
        deviation = max(deviation, round(abs(dropped - asked) / error, 2))
        text = f"{name} dropped {dropped:.5f} of {total} elements, expected {asked:.3g}"
        require(abs(dropped - asked) <= bound, text)
    elements = sum(site.elements for site in totals.sites.values())
    asked, dropped = round(totals.requested, 6), round(totals.dropped, 6)
    return {"elements": elements, "asked": asked, "dropped": dropped, "deviation": deviation}


def choose_regularizers(model: nn.Module, layers: Iterable[Any]) -> dict[str, hookdrop.Regularizer]:
    """Return a regularizer that fits the rank of each chosen layer: DropBlock for maps, Dropout for tokens and vectors.

    The layers are all normalization layers that run or, without any, all convolution and linear layers.
    """
    called = {layer.name: layer for layer in layers if layer.calls and layer.shape}
    modules = {name: model.get_submodule(name) for name in called}
    chosen = [name for name, module in modules.items() if _is_norm(module)]
    chosen = chosen or [name for name, module in modules.items() if isinstance(module, _ConvNd | nn.Linear)]
    return {name: _regularizer_for(name, modules[name], called[name].shape) for name in chosen}


def _is_norm(module: nn.Module) -> bool:
    """Return whether `module` is a normalization layer itself, not a block that contains one."""
    has_submodules = any(True for child in module.children() for _ in child.parameters())
    return "norm" in type(module).__name__.lower() and not has_submodules


def _regularizer_for(name: str, module: nn.Module, shape: tuple[int, ...]) -> hookdrop.Regularizer:
    if len(shape) not in (4, 5) or _HEADS.fullmatch(name):
        return hookdrop.Dropout(P)
    # Layer norms normalize the last axis, except timm's "2d" classes (NCHW). GlobalResponseNorm states its axis.
    normalizes_last = hasattr(module, "normalized_shape") and "2d" not in type(module).__name__.lower()
    channels_last = normalizes_last or getattr(module, "channel_dim", 1) == -1
    return hookdrop.DropBlock(P, BLOCK, channel_dim=-1) if channels_last else hookdrop.DropBlock(P, BLOCK)


def label(regularizer: hookdrop.Regularizer) -> str:
    """Return the class name, with " NHWC" if the channels are the last axis."""
    layout = " NHWC" if getattr(regularizer, "channel_dim", None) == -1 else ""
    return type(regularizer).__name__ + layout


def kind(text: str) -> str:
    """Reduce a message to its kind: its first line without names and numbers."""
    line = re.sub(r"'[^']*'(, '[^']*')*", "'...'", text.strip().splitlines()[0])
    short = re.sub(r"#(x#)+", "#x#", re.sub(r"\d+(\.\d+)?", "#", line))
    return ": ".join(short.split(": ")[:2])[:150]


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]

"""Measure the effect of regularizers on real tensors, and probe that they are active."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hookdrop.core.arguments import count
from hookdrop.core.compiling import GraphBreak
from hookdrop.core.hook import SiteHook, note_call, regularized
from hookdrop.core.registry import hooks_of, hooks_removed
from hookdrop.core.regularizer import CurrentRate, drops_elements
from hookdrop.core.selection import unwrapped
from hookdrop.core.sink import RateSink
from hookdrop.core.tables import some, text_table
from hookdrop.core.tensor_tree import tensors
from hookdrop.guards.problems import check_first_shape
from hookdrop.measure.observing import Record, dropped_elements, require_values, total
from hookdrop.methods.dropout_sinks import DropoutSink
from hookdrop.regularizers import Penalty
from hookdrop.survey.isolation import call, restored_after, set_modes, uncompiled


@dataclass
class Effect:
    """What regularizers did, at one site or at all."""

    calls: int = 0  #: The number of tensors that were regularized.
    elements: int = 0
    zeroed: float = 0.0  #: The number of input elements that the output does not depend on.
    asked_of_all: float = 0.0  #: The rate of each call, times its number of elements.
    asks: int = 0  #: The number of calls in which a rate says what to expect.
    droppable: int = 0  #: The number of elements in calls that show which elements they drop.
    magnitude_in: float = 0.0
    magnitude_out: float = 0.0

    @property
    def requested(self) -> float:
        """The current rate, averaged over the elements; 0 if there is none."""
        return self.asked_of_all / self.elements if self.elements else 0.0

    @property
    def dropped(self) -> float:
        """The fraction of dropped elements, of those in calls that drop elements."""
        return self.zeroed / self.droppable if self.droppable else 0.0

    @property
    def mean_ratio(self) -> float:
        """Mean |output| / mean |input|; 1 if it keeps the magnitude. NaN for scores of attention and skipped layers."""
        return self.magnitude_out / self.magnitude_in if self.magnitude_in else 1.0

    def row(self, name: str) -> tuple[str, str, str, str, int]:
        """Return the row of the table; a dash marks numbers that do not apply."""
        if not self.elements:
            return name, "-", "-", "-", self.calls
        asked, dropped = f"{self.requested:.3f}" if self.asks else "-", f"{self.dropped:.3f}" if self.droppable else "-"
        return name, asked, dropped, "-" if math.isnan(self.magnitude_in) else f"{self.mean_ratio:.3f}", self.calls


class Measurement(Effect):
    """The effect of all regularizers, and by site. `print` it for a table."""

    def __init__(self, hooks: Sequence[RateSink]) -> None:
        super().__init__()
        names = [hook.site for hook in hooks]
        self.labels = {
            hook: hook.site if names.count(hook.site) == 1 else f"{hook.site} ({hook.state.name}, {hook.at})"
            for hook in hooks
        }
        """The name of each site, with that of its injection where several injections share a site."""
        self.sites = {label: Effect() for label in self.labels.values()}
        self.eval_identical: bool | None = None
        """Whether eval output was bit-identical with and without hooks; None if it was not compared."""
        self.note = ""

    def record(self, hook: RateSink, rate: float | None, x: Tensor, y: Tensor, dropped: Tensor | None) -> None:
        """Record one call; see `Record`."""
        if hook not in self.labels:  # in another part of the model
            return
        drops = dropped is not None
        # The p of `Cutout`, for example, is not the fraction of dropped elements.
        asked = rate if hook.rate.kind == "drop" or not drops else None
        zeroed = 0.0 if dropped is None else total(dropped.sum())
        needs = hook.regularizer.needs if isinstance(hook, SiteHook) else ()
        # A branch that runs on some samples has no output for the others.
        some_rows = "rows" in needs and dropped is not None
        of_all = x.numel() / max(x.numel() - zeroed, 1.0) if some_rows else 1.0
        magnitude_in = of_all * total(x.detach().abs().sum(dtype=torch.float64))
        # Per element: some regularizers remove elements.
        share = x.numel() / y.numel() if y.numel() else 1.0
        magnitude_out = share * total(y.detach().abs().sum(dtype=torch.float64))
        asks, asked_of_all = asked is not None, (asked or 0.0) * x.numel()
        if hook.at == "scores" or {"rows", "layer_input"} <= {*needs}:  # no mean to keep, or an unknown one
            magnitude_in = magnitude_out = math.nan
        new = Effect(1, x.numel(), zeroed, asked_of_all, asks, drops * x.numel(), magnitude_in, magnitude_out)
        for effect in (self.sites[self.labels[hook]], self):
            for name, value in vars(new).items():
                setattr(effect, name, getattr(effect, name) + value)

    def rows(self) -> list[tuple[str, str, str, str, int]]:
        """Return one row per site and a row for all sites."""
        return [*(effect.row(name) for name, effect in self.sites.items()), self.row("all")]

    def __repr__(self) -> str:
        lines = [text_table(("site", "requested", "dropped", "mean ratio", "calls"), self.rows())]
        if self.eval_identical is not None:
            lines.append(f"eval output {'' if self.eval_identical else 'NOT '}bit-identical with and without hooks")
        return "\n".join([*lines, self.note] if self.note else lines)


@contextmanager
def measured_into(sinks: Sequence[RateSink], record: Record) -> Iterator[None]:
    """Pass what the hooks and the dropout of the model do in the calls inside to `record`.

    Compiled code runs uncompiled, because a graph break at every site would compile each piece anew. Only inside a
    compiled function, which PyTorch cannot leave, sites break the graph.
    """
    own = [sink for sink in sinks if isinstance(sink, DropoutSink)]
    if own:
        from hookdrop.measure.own_dropout import observed_into  # only dropout of the model needs it
    lives: list[Any] = list(dict.fromkeys(sink.state.live for sink in sinks))
    for live in lives:
        live.observe = live.observe or Observers()
        live.observe.append(record)
    stance = ExitStack()
    try:
        _BEGIN.call(stance)
        with observed_into(own, record) if own else nullcontext():
            yield
    finally:
        _END.call(stance)
        for live in lives:
            live.observe.remove(record)
            live.observe = live.observe or None


# PyTorch forbids a change of the stance in compiled code, so that it happens outside of the graph.
_REASON = "recording() runs compiled code uncompiled.\n  open it outside of the compiled function."
_BEGIN = GraphBreak(lambda stance: stance.enter_context(uncompiled()), _REASON)
_END = GraphBreak(ExitStack.close, _REASON)


class Observers(list[Record]):
    """Called in place of a regularizer.

    Dropped elements are those with a zero derivative, whatever their values and whichever library the regularizer is
    from. The derivative is computed in an extra run from the same RNG state, so that the actual run has the same mask
    and leaves the same RNG state as without measuring.
    """

    def __call__(self, hook: SiteHook, x: Tensor, rate: CurrentRate, **context: Any) -> Tensor:
        require_values(x)
        # A copy, because the regularizer may be stateful.
        twin = copy.deepcopy(hook.regularizer)
        dropped = dropped_elements(lambda x: regularized(twin, x, rate.value, **context), x)
        y = regularized(hook.regularizer, x, rate.value, **context)
        for record in self:
            # A stopped gradient is no dropped element.
            record(hook, rate.value, x, y, dropped if drops_elements(hook.regularizer) else None)
        return y


# --- a few forward passes without side effects


@contextmanager
def without_bookkeeping(model: nn.Module) -> Iterator[None]:
    """Restore what the hooks know of their calls afterwards."""
    hooks = [hook for _, hook in hooks_of(model)]
    marks = [(hook.called, hook.trained, hook.last_shape, hook.listeners) for hook in hooks]
    lives = {hook.state.live: (hook.state.live.checkpointed, hook.state.live.trained) for hook in hooks}
    for hook in hooks:
        hook.called = hook.trained = False
        hook.listeners = (note_call, check_first_shape) if check_first_shape in hook.listeners else (note_call,)
    for live in lives:
        live.checkpointed = None
    try:
        yield
    finally:
        for hook, mark in zip(hooks, marks, strict=True):
            hook.called, hook.trained, hook.last_shape, hook.listeners = mark
        for live, saved in lives.items():
            live.checkpointed, live.trained = saved


@contextmanager
def measured_gradients(model: nn.Module) -> Iterator[None]:
    """Allow a forward and backward pass without side effects, in which no gradient of a parameter is computed."""
    inner = unwrapped(model)
    trained = [parameter for parameter in inner.parameters() if parameter.requires_grad]
    inner.requires_grad_(False)
    try:
        with torch.inference_mode(False), torch.enable_grad(), without_bookkeeping(model), restored_after(inner):
            yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def probe(model: nn.Module, sinks: Sequence[RateSink], x: Any, forwards: int) -> Measurement:
    """Measure `forwards` training-mode passes on `x`, and compare eval output with and without hooks."""
    forwards = count(forwards, "forwards", "probe")
    inner = unwrapped(model)
    for parameter in inner.parameters():
        require_values(parameter)
    result = Measurement(sinks)
    notes = []
    with without_bookkeeping(model), restored_after(model), torch.no_grad():
        # `train()` is not called, because some classes merge weights in it (LoRA).
        modes = [(module, module.training or not inner.training) for module in inner.modules()]
        set_modes(inner)
        if any(isinstance(sink, SiteHook) for sink in sinks):
            result.eval_identical = _eval_identical(inner, x)
        for module, training in modes:
            module.training = training
        with measured_into(sinks, result.record):
            for _ in range(forwards):
                call(inner, x)
        for state in dict.fromkeys(sink.state for sink in sinks):
            own = [sink for sink in sinks if sink.state is state]
            if not any(result.sites[result.labels[sink]].calls for sink in own):
                notes.append(f"nothing was dropped: {why_idle(own[0])}")
            elif all(isinstance(sink, SiteHook) and isinstance(sink.regularizer, Penalty) for sink in own):
                notes.append(f"{state.name!r} adds terms to the loss, and changes no forward")
            elif all(isinstance(sink, SiteHook) and sink.regularizer.in_backward for sink in own):
                notes.append(f"{state.name!r} edits gradients in the backward pass, and changes no forward")
    idle = [result.labels[sink] for sink in sinks if sink.p == 0 and not result.sites[result.labels[sink]].calls]
    if idle and result.calls:
        notes.append(f"at rate 0, so without calls: {some(idle)}")
    zeros = [label for label, effect in result.sites.items() if effect.elements and not effect.magnitude_in]
    if zeros:  # as after the last norm of a residual branch, whose weight often begins at 0
        notes.append(f"no effect yet, because the layer returns only zeros: {some(zeros)}")
    result.note = "\n".join(notes)
    return result


def _eval_identical(model: nn.Module, x: Any) -> bool | None:
    with restored_after(model, trains=False):
        regularized = tensors(call(model, x))
    with restored_after(model, trains=False), hooks_removed(model):
        clean = tensors(call(model, x))
    if not clean:
        return None
    # Each rank compares its own shard of a DTensor.
    local = [[t.to_local() if hasattr(t, "to_local") else t for t in found] for found in (clean, regularized)]
    return len(clean) == len(regularized) and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
        for a, b in zip(*local, strict=True)
    )


def why_idle(sink: RateSink) -> str:
    """Return why a hook or a dropout of the model did nothing."""
    state = sink.state
    if not state.on:
        return f"{state.name!r} is disabled or removed"
    if sink.target is not None and sink.p == sink.rate.neutral:
        return f"its rate is {sink.p:g} at step {state.step_count} of {state.schedule} (at another: probe(x, step=...))"
    if isinstance(sink, DropoutSink):
        return "it did not run in training mode, or drops in a way that cannot be measured"
    return (
        "it was not called in training mode (the layer is in eval mode?)"
        if sink.called
        else "the layer was never called"
    )

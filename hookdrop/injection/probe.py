"""Verify that an injection is active, by a few forwards without side effects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hookdrop.guards.problems import without_bookkeeping
from hookdrop.hooks.hook import SiteHook
from hookdrop.hooks.registry import hooks_removed
from hookdrop.hooks.state import InjectionState
from hookdrop.injection.measurement import Measurement, measured_into, require_values
from hookdrop.survey.isolation import call, restored_after, set_eval
from hookdrop.utils.names import unwrapped
from hookdrop.utils.tensor_tree import tensors
from hookdrop.utils.validation import count


def probe(model: nn.Module, hooks: Sequence[SiteHook], x: Any, forwards: int) -> Measurement:
    """Measure `forwards` training-mode forwards on `x`, and compare eval output with and without hooks."""
    forwards = count(forwards, "forwards", "probe")
    inner = unwrapped(model)
    for parameter in inner.parameters():
        require_values(parameter)
    result = Measurement(hooks)
    notes = [_note_on_modes(inner)]
    with without_bookkeeping(model), restored_after(model), torch.no_grad():
        # `train()` is not called, because some classes merge weights in it (LoRA).
        modes = [(module, module.training or not inner.training) for module in inner.modules()]
        set_eval(inner)
        result.eval_identical = _eval_identical(inner, x)
        for module, training in modes:
            module.training = training
        with measured_into(hooks, result.record):
            for _ in range(forwards):
                call(inner, x)
        for state in reversed(list(dict.fromkeys(hook.state for hook in hooks))):
            notes.insert(0, _note(state, [hook for hook in hooks if hook.state is state], result))
    result.note = "\n".join(filter(None, notes))
    return result


def _note_on_modes(model: nn.Module) -> str:
    own = [m for m in model.modules() if getattr(m.train, "__func__", None) is not nn.Module.train]
    if model.training or not own:
        return ""
    return (
        f"the model was in eval mode, and {type(own[0]).__name__} overrides train(), which probe() does not call: "
        "call model.train() first to probe in the modes that it sets"
    )


def _eval_identical(model: nn.Module, x: Any) -> bool | None:
    with restored_after(model, trains=False):
        regularized = tensors(call(model, x))
    with restored_after(model, trains=False), hooks_removed(model):
        clean = tensors(call(model, x))
    if not clean:
        return None
    return len(clean) == len(regularized) and all(map(_same, clean, regularized))


def _same(a: Tensor, b: Tensor) -> bool:
    # Each rank compares its own shard of a DTensor.
    a, b = (t.to_local() if hasattr(t, "to_local") else t for t in (a, b))
    return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def _note(state: InjectionState, hooks: Sequence[SiteHook], result: Measurement) -> str:
    if not state.on:
        return f"{state.name!r} is disabled: drop.enabled = True"
    calls = sum(result.sites[result.labels[hook]].calls for hook in hooks)
    if calls and all(hook.regularizer.in_backward for hook in hooks):
        return f"{state.name!r} edits gradients in the backward pass, so it changes nothing in these forwards"
    if calls:
        return ""
    if state.multiplier == 0.0 and any(hook.train_rate is not None and hook.train_rate.neutral for hook in hooks):
        return (
            f"nothing was dropped: the rate is 0 at step {state.step_count} of {state.schedule}; "
            "measure a later step with probe(x, step=...)"
        )
    if not any(hook.trained for hook in hooks):
        return "nothing was dropped: no site was called in training mode (never called, or kept in eval mode)"
    neutral = {f"{hook.rate.neutral:g}" for hook in hooks if hook.target is not None}
    return f"nothing was dropped: the rate is {' or '.join(sorted(neutral))}"

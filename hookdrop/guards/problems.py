"""Compare a model with its injection: what was lost, moved or copied, what never ran, and with which shapes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from hookdrop.core import events
from hookdrop.core.errors import ShapeError
from hookdrop.core.hook import SiteHook, first_listeners
from hookdrop.core.parts import REGULARIZERS
from hookdrop.core.registry import hooks_of
from hookdrop.core.regularizer import Regularizer
from hookdrop.core.selection import layers_by_name, module_at
from hookdrop.core.state import InjectionState
from hookdrop.core.tables import some
from hookdrop.core.tensor_tree import container_of
from hookdrop.core.torch_internals import full_backward_hooks_of, parameters_of
from hookdrop.guards.messages import message, warn_each
from hookdrop.methods.calls import partial_calls
from hookdrop.training.seeding import announce, find_rank_with_same_seed

CHANGES = ("lost", "copied", "moved", "full_backward_hook")
USE = ("untrained", "silent", "always_in_eval", "equal_masks", "rows")


class Comparison:
    def __init__(
        self, model: nn.Module, state: InjectionState, hooks: Sequence[SiteHook] | None = None, requested: bool = False
    ) -> None:
        self.model, self.state, self.requested, self.name = model, state, requested, state.name
        # Inside `without_hooks`, no hook is on the model.
        self._everything = [] if state.live.hidden_count else list(hooks_of(model))
        self.placed = [(module, hook) for module, hook in self._everything if hook.state is state]
        self.hooks = [hook for _, hook in self.placed] if hooks is None else hooks

    @property
    def known(self) -> int:
        """The number of sites. A copy of a submodule has only some of those of the injection."""
        return sum(site in self.state.live.known_sites for site in self.state.sites)

    @property
    def and_resume(self) -> str:
        """The call that resumes the schedule in a new injection."""
        return f", then drop.seek({self.state.step_count})" if self.state.step_count else ""

    @cached_property
    def lost(self) -> list[str]:
        """A site of the plan has no hook on the model."""
        state, live = self.state, self.state.live
        if live.hidden_count:
            return []
        there = {hook.site for _, hook in self.placed} | set(self.copied)
        there |= {one.site for one in live.members if one.is_attached and not isinstance(one, SiteHook)}
        # A handle on a submodule does not report sites elsewhere in the model as lost.
        root = None if live.root is None else live.root()
        if all(module is not root for module in self.model.modules()):
            own = {hook.site for hook in self.hooks}
            there |= {hook.site for hook in live.members if hook.is_attached and hook.site not in own}
        return [site for site in state.sites if site in live.known_sites and site not in there]

    @cached_property
    def copied(self) -> list[str]:
        """The model has hooks whose state is a copy of this one."""
        others = [hook for _, hook in self._everything if hook.state is not self.state]
        return [hook.site for hook in others if hook.state.key == self.state.key]

    @cached_property
    def moved(self) -> dict[str, Any]:
        """The hooked module is still part of the model, but its site is now another module, or none."""
        root = None if self.state.live.root is None else self.state.live.root()
        suspects = [] if root is None else [x for x in self.placed if module_at(root, x[1].site) is not x[0]]
        now = layers_by_name(root) if root is not None and suspects else {}
        names, found = {layer.module: layer.name for layer in now.values()}, {}
        for module, hook in suspects:
            # Fusion and quantization move hooks to another module, or leave an identity where the module was.
            at = now[hook.site].module if hook.site in now else None
            stays = at is module or isinstance(at, nn.Identity)
            if not stays and module in names and hook.was_placed_on(module) and hook.site not in self.copied:
                found[hook.site] = names[module]
        return found and {"sites": some([*found]), "now": some([*found.values()]), "found": found}

    @property
    def full_backward_hook(self) -> list[str]:
        """A module with weights, hooked at its output, has full backward hooks: PyTorch attaches them after ours."""
        outputs = [(module, hook.site) for module, hook in self.placed if hook.at == "output"]
        return [site for module, site in outputs if full_backward_hooks_of(module) and any(parameters_of(module))]

    @property
    def untrained(self) -> dict[str, int]:
        """A check that was requested, after steps of optimizers that train other models, before any site ran."""
        counter = self.state.live.update_counter
        steps = 0 if counter is None or counter.updates else counter.steps_of_others
        return {"steps": steps} if self.requested and steps and not any(hook.called for hook in self.hooks) else {}

    @cached_property
    def intact(self) -> list[SiteHook]:
        """The hooks that are neither lost nor copied nor moved."""
        changed = {*self.lost, *self.copied, *self.moved.get("found", ())}
        return [hook for hook in self.hooks if hook.site not in changed]

    @cached_property
    def started(self) -> bool:
        """Whether the training has certainly started."""
        live = self.state.live
        updated = live.update_counter is not None and live.update_counter.was_updated()
        return any(hook.trained for hook in self.intact) or updated or live.moves >= events.MOVES

    @property
    def silent(self) -> list[str]:
        """A hook was not called, although others were, weights were updated, or the schedule advanced."""
        silent, live = [hook.site for hook in self.intact if not hook.called], self.state.live
        updates = 0 if live.update_counter is None else live.update_counter.updates
        begun = self.requested and (live.moves > 0 or updates > 0)
        return silent if self.started or begun or len(silent) < len(self.intact) else []

    @property
    def always_in_eval(self) -> list[str]:
        """A hook was called, but never in training mode, although the training has started."""
        idle = [hook.site for hook in self.intact if hook.called and not hook.trained]
        return idle if self.started and self.state.enabled else []

    @property
    def equal_masks(self) -> dict[str, int]:
        """Another rank published the seed of this rank in the job's store."""
        asked = self.state.enabled and (self.requested or self.started)
        found = find_rank_with_same_seed(self.model) if asked else None
        return {} if found is None else {"first": min(found[:2]), "second": max(found[:2]), "seed": found[2]}

    @property
    def rows(self) -> dict[str, Any]:
        """Axis 0 of a site has several times the rows of another site, and both draw once for each row."""
        return _different_rows(self.intact)


# --- the first calls of a hook


def check_first_shape(hook: SiteHook, module: nn.Module, value: Any) -> None:
    """Check the shape of the first tensor, even if the rate is still 0: a ramp would otherwise fail much later."""

    def check(x: Tensor, **context: Any) -> Tensor:
        _refuse_layout(hook.regularizer, value, x)
        hook.regularizer.check(x.shape)
        # A symbolic size (make_fx) references its trace, which can be neither copied nor pickled.
        if all(type(size) is int for size in x.shape) and not partial_calls.stack:
            hook.last_shape = x.shape
            warn_about_shape(hook)
            if _draws_for_rows(hook) and (found := _different_rows(hook.state.live.members)):
                hook.state.warn_once("rows", message("rows", hook.state, found))
        # Ranks announce their seeds when they draw their first masks.
        announce(x.device)
        return x

    if (hook.train_rate if module.training else hook.eval_rate) is not None:
        hook.edit(module, value, check)


def warn_about_shape(hook: SiteHook) -> None:
    """Warn about the last shape, once. Compiled graphs cannot raise warnings, so their shapes are checked in `step`."""
    hook.unsubscribe(check_first_shape)
    warn_each(hook.state, shape_warnings(hook))
    if isinstance(hook.regularizer, REGULARIZERS["DropBlock"]):  # a later map may be smaller than a block
        hook.on_new_shape = warn_about_shape


def _warn_about_deferred_shapes(state: InjectionState) -> None:
    """Warn about the shapes that compiled code has seen."""
    for hook in state.live.members:
        if isinstance(hook, SiteHook) and hook.last_shape is not None and hook.listeners:
            warn_about_shape(hook)


events.rates_set.append(_warn_about_deferred_shapes)


def shape_warnings(hook: SiteHook) -> dict[str, str]:
    """Return the warnings about the last shape, by kind, so that similar blocks warn only once."""
    found = [] if hook.last_shape is None else hook.regularizer.shape_warnings(hook.last_shape)
    see_all = "\n  all sites: print(plan(..., example_input=x))"
    return {re.sub(r"\d+", "#", text): f"{hook.where}: {text}{see_all}" for text in found}


def _different_rows(hooks: Iterable[SiteHook]) -> dict[str, Any]:
    sites = [(hook.last_shape[0], hook.site) for hook in hooks if _draws_for_rows(hook) and hook.last_shape]
    (least, few), (most, many) = min(sites, default=(0, "")), max(sites, default=(0, ""))
    different = 0 < least < most and most % least == 0
    return {"many": many, "few": few, "most": most, "least": least} if different else {}


def _draws_for_rows(hook: SiteHook) -> bool:
    """Whether the regularizer draws once for each row of axis 0, which it takes for a sample."""
    drop = hook.regularizer
    return "samples" in vars(drop) and drop.samples is None and bool(drop.independent_samples)


def _refuse_layout(regularizer: Regularizer, value: Any, x: Tensor) -> None:
    """Raise `ShapeError` if axis 0 of the tensor is not what the regularizer takes it for."""
    has_axes = regularizer.axes.startswith("N") or bool(vars(regularizer).get("shared"))
    if has_axes and isinstance(container_of(value, x), PackedSequence):
        raise ShapeError(
            "got a PackedSequence, whose rows are time steps of different samples.\n"
            "  hook a layer before pack_padded_sequence or after pad_packed_sequence, or use a regularizer that needs "
            "no samples: Dropout(p=...), ActivationPenalty(slowness=0)."
        )
    if any(placement.is_partial() for placement in getattr(x, "placements", ())) and not regularizer.in_backward:
        raise ShapeError(
            "got a DTensor whose values are the terms of a sum over ranks (Partial), not yet added.\n"
            "  inject after parallelize_module, so that the hook gets the sum."
        )
    if x.is_nested and x.layout is torch.strided:
        raise ShapeError("got a strided NestedTensor, which has no shape.\n  build it with layout=torch.jagged.")


first_listeners.append(check_first_shape)

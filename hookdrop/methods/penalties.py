"""The loss terms of penalties, from the forward passes that add them until `Injection.penalty` reads them."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hookdrop.core import compiling
from hookdrop.core.errors import InjectionError, ShapeError
from hookdrop.core.hook import SiteHook
from hookdrop.core.sink import CompanionHook
from hookdrop.core.state import InjectionState
from hookdrop.core.torch_internals import graph_task, skip_frames_of, when_compiler_is_imported
from hookdrop.methods.calls import CallValue
from hookdrop.training.checkpointing import callers

MOST_UNREAD = 2**12  # how many terms are kept without an update of the weights: a cell may run at each time step


class _Compiled:
    """A term of compiled code and the one before. It would guard on the length of a list, and a sum joins graphs."""

    def __init__(self, earlier: _Compiled | None, term: Tensor) -> None:
        self.earlier, self.term = earlier, term


class LossTerms:
    """The unread loss terms of an injection, which hold the graphs of their forward passes.

    An update of the weights ends the use of these graphs: the terms since the last update supersede earlier ones, which
    count if there are no later ones, such as after the step of a discriminator.
    """

    def __init__(self) -> None:
        self.unread_updates = 0  # how many updates of the weights came between forward and reading, since a reading
        self._updates = 0
        self.watched: set[int] = set()  # the ids of the modules around the layers, while hooks are placed
        self.calls = CallValue()  # the last terms before each call in progress, whose frame ends earlier by an error
        self._clear()

    def _clear(self) -> None:
        self.terms: deque[Tensor] = deque(maxlen=MOST_UNREAD)
        self.compiled: _Compiled | None = None
        self.superseded: list[Tensor] = []

    def _since_update(self) -> list[Tensor]:
        self.forget_failed()
        found, last = [*self.terms], self.compiled
        while last is not None:
            found.insert(len(self.terms), last.term)
            last = last.earlier
        return found

    def forget_failed(self) -> None:
        """Forget the terms of calls that failed, such as for lack of memory: the next try adds them again."""
        while self.calls.is_left:
            last, compiled = self.calls.end()
            while self.terms and self.terms[-1] is not last:
                self.terms.pop()
            self.compiled = self.compiled and compiled

    def watch_calls(self, hook: SiteHook, module: nn.Module) -> None:
        """Watch the calls of all modules around a layer, any of which may be tried again after an error."""
        root = hook.state.live.root and hook.state.live.root()
        for parent in root.modules() if root else ():
            if parent is not module and id(parent) not in self.watched and module in parent.modules():
                self.watched.add(id(parent))
                hook.accompany(parent.register_forward_pre_hook, _watch_call, True)
                hook.accompany(parent.register_forward_hook, _watch_call, False)

    def collect(self, hook: SiteHook, x: Tensor, rate: float | None, context: Mapping[str, Any]) -> None:
        """Compute the loss term of a call, and keep it."""
        if not torch.is_grad_enabled():
            if any(code.co_qualname == "CheckpointFunction.forward" for code in callers()):
                raise InjectionError(
                    f"{hook.where}: a reentrant checkpoint runs its forward without gradients, so its loss term would "
                    "have none.\n  checkpoint(..., use_reentrant=False)   or hook a layer outside of the checkpoint"
                )
            return
        term = _loss_term(hook, x, rate, context)
        # A recompute repeats the operations, because a checkpoint counts the saved tensors, but the term counts once.
        if graph_task() != -1:
            return
        if len(self.terms) == MOST_UNREAD:
            hook.state.warn_once(
                "unread terms",
                f"{hook.state.name!r}: more than {MOST_UNREAD} loss terms were not read, so the oldest are dropped.\n"
                "  read them with drop.penalty(), or run such forwards inside: with drop.disabled(): ...",
            )
        self.superseded = []
        self.terms.append(term)

    def collect_in_graph(self, hook: SiteHook, x: Tensor, rate: Tensor | None, context: Mapping[str, Any]) -> None:
        """Like `collect`, for compiled code. An exported program has no loss."""
        if torch.is_grad_enabled() and not compiling.is_exporting():
            self.compiled = _Compiled(self.compiled, _loss_term(hook, x, rate, context))

    def note_updates(self, updates: int) -> None:
        """Take note of how often the weights have been updated."""
        found = self._since_update() if updates != self._updates else []
        self._updates = updates
        if found:
            self._clear()
            self.superseded, self.unread_updates = found, self.unread_updates + 1

    def take(self) -> list[Tensor]:
        """Return the terms that count, and forget all."""
        found = self._since_update() or self.superseded
        self._clear()
        self.unread_updates = 0
        return found


def total(terms: list[Tensor], model: nn.Module) -> Tensor:
    """Return the sum on the device of the last term, which is the nearest to the loss; 0 without terms."""
    if not terms:
        weights = [weight.device for weight in model.parameters()]
        return torch.zeros((), device=weights[-1] if weights else None)
    whole = [term.full_tensor() if hasattr(term, "full_tensor") else term for term in terms]  # a DTensor is a share
    moved = [term.to(whole[-1].device) for term in whole]
    return sum(moved[1:], start=moved[0])


def _watch_call(hook: SiteHook, begins: bool, *_: Any) -> None:
    # A graph that fails adds no term. A recompute adds none, and a checkpoint ends it by an exception.
    if torch.compiler.is_compiling() or graph_task() != -1:
        return
    terms: LossTerms = hook.state.live.loss_terms
    if begins:
        terms.forget_failed()
        terms.calls.start((terms.terms[-1] if terms.terms else None, terms.compiled), sys._getframe(2))
    else:
        terms.calls.end()


when_compiler_is_imported(lambda: skip_frames_of(CompanionHook.__call__, CallValue.end, _watch_call))


def read_penalty(states: Sequence[InjectionState], name: str, model: Callable[[], nn.Module]) -> Tensor:
    """Return the sum of the unread terms of these injections, and clear it."""
    found = [state.live.loss_terms for state in states if state.live.loss_terms is not None]
    if not found:
        raise InjectionError(
            f"penalty(): {repr(name) if name else 'this model'} adds no term to the loss.\n"
            "  inject(model, ActivationPenalty(), layers=...)   or for all injections: find(model).penalty()"
        )
    return total([term for terms in found for term in terms.take()], model())


def _loss_term(hook: SiteHook, x: Tensor, rate: Any, context: Mapping[str, Any]) -> Tensor:
    penalty: Any = hook.regularizer
    term = penalty.penalize(x, rate, **context)
    if not isinstance(term, Tensor) or term.dim():
        got = f"a tensor of shape {tuple(term.shape)}" if isinstance(term, Tensor) else type(term).__name__
        raise ShapeError(f"penalize returned {got}, but a loss term is a 0-d tensor.\n  return its mean() or sum()")
    return term

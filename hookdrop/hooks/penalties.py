"""The loss terms of penalties, from the forward passes that add them until `Injection.penalty` reads them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hookdrop.hooks import compiling
from hookdrop.hooks.checkpointing import is_inside_reentrant_checkpoint, is_recomputing
from hookdrop.utils.errors import InjectionError, ShapeError

if TYPE_CHECKING:
    from hookdrop.hooks.hook import SiteHook

MOST_UNREAD = 2**12  # how many terms are kept without an update of the weights: a cell may run at each time step


class LossTerms:
    """The unread loss terms of an injection, which hold the graphs of their forward passes.

    An update of the weights ends the use of these graphs: the terms since the last update supersede earlier ones, which
    count if there are no later ones, such as after the step of a discriminator.
    """

    def __init__(self) -> None:
        self.unread_updates = 0  # how many updates of the weights came between forward and reading, since a reading
        self._updates = 0
        self._clear()

    def _clear(self) -> None:
        self.terms: deque[Tensor] = deque(maxlen=MOST_UNREAD)
        self.compiled: Tensor | None = None  # those of compiled code: a sum, because it guards on the length of a list
        self.superseded: list[Tensor] = []

    def _since_update(self) -> list[Tensor]:
        return [*self.terms] if self.compiled is None else [*self.terms, self.compiled]

    def add(self, term: Tensor) -> bool:
        """Keep a term. Returns whether there are too many, so that the oldest was dropped."""
        self.superseded = []
        full = len(self.terms) == MOST_UNREAD
        self.terms.append(term)
        return full

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


def collect(hook: SiteHook, x: Tensor, rate: float | None, context: Mapping[str, Any]) -> None:
    """Compute the loss term of a call, and keep it."""
    if not torch.is_grad_enabled():
        if is_inside_reentrant_checkpoint():
            raise InjectionError(
                f"{hook.where}: a reentrant checkpoint runs its forward without gradients, so its loss term would have "
                "none.\n  checkpoint(..., use_reentrant=False)   or hook a layer outside of the checkpoint"
            )
        return
    term = _loss_term(hook, x, rate, context)
    # A recompute repeats the operations, because a checkpoint counts the saved tensors, but the term counts once.
    if not is_recomputing() and _terms_of(hook).add(term):
        hook.state.warn_once(
            "unread terms",
            f"{hook.state.name!r}: more than {MOST_UNREAD} loss terms were not read, so the oldest are dropped.\n"
            "  read them with drop.penalty(), or run such forwards inside: with drop.disabled(): ...",
        )


def collect_in_graph(hook: SiteHook, x: Tensor, rate: Tensor | None, context: Mapping[str, Any]) -> None:
    """Like `collect`, for compiled code. An exported program has no loss."""
    if torch.is_grad_enabled() and not compiling.is_exporting():
        term, terms = _loss_term(hook, x, rate, context), _terms_of(hook)
        terms.compiled = term if terms.compiled is None else terms.compiled + term.to(terms.compiled.device)


def _loss_term(hook: SiteHook, x: Tensor, rate: Any, context: Mapping[str, Any]) -> Tensor:
    penalty: Any = hook.regularizer
    term = penalty.penalize(x, rate, **context)
    if not isinstance(term, Tensor) or term.dim():
        got = f"a tensor of shape {tuple(term.shape)}" if isinstance(term, Tensor) else type(term).__name__
        raise ShapeError(f"penalize returned {got}, but a loss term is a 0-d tensor.\n  return its mean() or sum()")
    return term


def _terms_of(hook: SiteHook) -> LossTerms:
    terms: LossTerms = hook.state.live.loss_terms  # type: ignore[assignment]
    return terms

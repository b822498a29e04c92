"""What the callbacks for all trainers share: specs, placed, restored before or after placement, and removed."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from hookdrop.core.arguments import named_arguments
from hookdrop.core.handle import Injection, find
from hookdrop.core.inject import inject
from hookdrop.core.spec import InjectionSpec
from hookdrop.core.tables import counted
from hookdrop.training.seeding import seed_per_rank


def _check_length(placed: Injection, total_steps: int | None) -> None:
    (state,), end = placed._states, placed.schedule.settles_at
    if total_steps is not None and end is not None and end > total_steps:
        state.warn_once(
            "longer",
            f"{state.name!r}: {state.schedule} ends at step {end}, but the training at step {total_steps}.\n"
            "  a float is a fraction of the training: LinearSchedule(steps=1.0)",
        )


class Placement:
    """Places specs, or mappings of their settings, on a model: all or none. `specs` may come from a file."""

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        cls.__init__ = named_arguments(cls.__init__)  # type: ignore[method-assign]

    def __init__(self, spec: Sequence[Any], specs: Any = (), *, seed_per_rank: bool) -> None:
        more = [specs] if isinstance(specs, InjectionSpec | Mapping | str) else specs or ()
        given = [*spec, *more]
        if not given:
            raise TypeError('pass at least one spec, such as InjectionSpec("Dropout(p=0.1)", layers="head")')
        self._specs = [one if isinstance(one, InjectionSpec) else InjectionSpec.from_dict(one) for one in given]
        self.seed_per_rank = seed_per_rank
        self._injection: Injection | None = None
        self.pending: Mapping[str, Any] | None = None
        """The state that the next placement restores, which trainers may set; empty or None for none."""

    @property
    def injection(self) -> Injection | None:
        """The handle on all injections, from the start of the training."""
        return self._injection

    def _place(self, model: nn.Module, total_steps: int | None, rank: int, ranks: int) -> None:
        """Replace the injections of an earlier training by new ones, and restore a pending state."""
        self._remove_earlier(model)
        try:
            for spec in self._specs:
                placed = inject(model, spec, total_steps=total_steps)
                _check_length(placed, total_steps)
                earlier = [] if self._injection is None else self._injection._sinks
                self._injection = Injection(model, [*earlier, *placed._sinks])
            if self.pending:
                self.load_state_dict(self.pending)
        except BaseException:
            self._remove()
            raise
        finally:
            self.pending = None
        if self.seed_per_rank and ranks > 1:
            seed_per_rank(rank=rank)

    def _leave(self) -> None:
        """Leave the hooks on the model after a training, until the next one."""
        for state in () if self._injection is None else self._injection._states:
            state.training_ended = True

    def _remove_earlier(self, model: nn.Module) -> None:
        """Remove the hooks that this callback, or another one for an earlier training, has left on the model."""
        self._remove()
        for drop in find(model):
            if any(state.training_ended for state in drop._states):
                drop.remove()

    def _seek(self, step: int) -> None:
        if self._injection is not None:
            self._injection.seek(step)

    def _penalty(self) -> Tensor | None:
        """Read the loss terms of the batch; None if no regularizer adds any."""
        drop = self._injection
        return drop.penalty() if drop is not None and drop._penalizes else None

    def _metrics(self) -> dict[str, float]:
        return {} if self._injection is None else self._injection.metrics()

    def _remove(self) -> None:
        """Remove all hooks; while an exception is handled, without warnings that would distract from it."""
        if self._injection is not None:
            self._injection.__exit__(*sys.exc_info())
        self._injection = None

    def state_dict(self) -> dict[str, Any]:
        """The state of the injections; empty before they are placed."""
        return {} if self._injection is None else self._injection.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the injections; before they are placed, keep the state until then."""
        if self._injection is None:
            self.pending = state_dict
        else:
            self._injection.load_state_dict(state_dict)

    def __repr__(self) -> str:
        return f"<InjectionCallback: {counted(len(self._specs), 'spec')}>"
